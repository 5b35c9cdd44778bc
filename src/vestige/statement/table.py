"""One table for every reader: as Markdown for files, as HTML for pages, by rich for terminals.

Whatever a cell says is shown and never obeyed: each output escapes it in its own way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from vestige.statement.escaping import in_markdown, in_terminal

if TYPE_CHECKING:
    from jinja2 import Template
    from markupsafe import Markup
    from rich.table import Table as RichTable

# A line below the head and nothing else: nine columns must fit into eighty characters.
_RULED = "    \n    \n ── \n    \n    \n    \n    \n    \n"


@dataclass(frozen=True)
class Table:
    """Headings, lines of cells, and a caption that HTML and rich show.

    The first `words` columns hold words. The others hold numbers that the program has formatted:
    they are set to the right, and Markdown shows them as they are.
    """

    headings: Sequence[str]
    lines: Sequence[Sequence[str]]
    caption: str = ""
    words: int = 1

    def markdown(self) -> str:
        """The table as GitHub's Markdown, without its caption."""
        body = [
            [in_markdown(cell) if place < self.words else cell for place, cell in enumerate(line)]
            for line in self.lines
        ]
        rule = ["---"] * len(self.headings)
        head = [in_markdown(heading) for heading in self.headings]
        rows = [f"| {' | '.join(line)} |" for line in (head, *body)]
        return "\n".join([rows[0], f"|{'|'.join(rule)}|", *rows[1:]])

    def html(self) -> Markup:
        """The table in a frame that scrolls, with a name for those who reach it by keyboard.

        The first cell of a line is its heading; cells with numbers have the class "number".
        """
        from markupsafe import Markup

        return Markup(_page().render(table=self))

    def rich(self) -> RichTable:
        """The table for a terminal."""
        from rich.box import Box
        from rich.table import Table as RichTable

        title = in_terminal(self.caption) or None
        table = RichTable(
            box=Box(_RULED), padding=0, show_edge=False, title=title, title_justify="left"
        )
        for place, heading in enumerate(self.headings):
            if place < self.words:
                table.add_column(in_terminal(heading), overflow="fold", min_width=10)
            else:
                table.add_column(in_terminal(heading), justify="right", no_wrap=True)
        for line in self.lines:
            table.add_row(*map(in_terminal, line))
        return table


@cache
def _page() -> Template:
    from jinja2 import Environment, PackageLoader

    loader = PackageLoader("vestige", "statement")
    return Environment(loader=loader, autoescape=True).get_template("table.html.j2")
