"""The statement as a PDF: its Markdown, read by markdown-it and set by fpdf2.

matplotlib's PdfPages was considered: it has no paragraphs, no outline and no tables that go on over
pages, so all of that would have to be written here. Its fonts are used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError
from vestige.statement.page import reader
from vestige.statement.words import markdown

if TYPE_CHECKING:
    from fpdf import FPDF
    from markdown_it.token import Token

_FONT, _POINTS = "DejaVu", 9.5
_SIZES = {"h1": 19.0, "h2": 12.5}
_MARGIN, _FOOT, _LINE, _GAP, _INDENT, _CELL = 20.0, 18.0, 4.6, 2.2, 4.5, 1.6  # mm
_WITH_HEADING = 28.0  # mm that a heading wants below it, so that it does not end a page
_FACES = {"": "DejaVuSans.ttf", "B": "DejaVuSans-Bold.ttf"}
_UNDATED = datetime(1970, 1, 1, tzinfo=UTC)


def pdf(statement: Mapping[str, Any]) -> bytes:
    """The statement on numbered pages of A4, with an outline.

    Guarantee: a function of the statement alone, so the same bytes each time. Nothing in the
    statement is obeyed, as in its Markdown, and the file links to nothing.
    """
    tokens = reader().parse(markdown(statement))
    pages = _blank()
    _set(pages, tokens)
    return bytes(pages.output())


def _blank() -> FPDF:
    """An empty document with one page, in a font that has more than Latin letters."""
    try:
        from fpdf import FPDF
        from matplotlib import get_data_path
    except ModuleNotFoundError as error:
        package = {"fpdf": "fpdf2"}.get(error.name or "", error.name)
        raise ConfigError(
            f"the PDF of a statement needs {package}, which is not installed: pip install "
            "'vestige-dp[cli,pdf]', or print the page that --out NAME.html writes."
        ) from error

    class Pages(FPDF):
        def footer(self) -> None:
            self.set_y(5 - _FOOT)
            self.set_font(_FONT, size=7.5)
            self.cell(0, 4, f"Privacy statement, page {self.page_no()} of {{nb}}", align="C")

    pages = Pages(format="A4")
    for style, name in _FACES.items():
        pages.add_font(_FONT, style, Path(get_data_path(), "fonts", "ttf", name))
    pages.set_margin(_MARGIN)
    pages.set_auto_page_break(True, _FOOT)
    pages.set_title("Privacy statement")
    pages.set_lang("en")
    pages.set_creation_date(_UNDATED)
    pages.set_draw_color(180)
    pages.add_page()
    pages.set_font(_FONT, size=_POINTS)
    return pages


def _set(pages: FPDF, tokens: Sequence[Token]) -> None:
    """Set blocks in their order: headings, paragraphs, lists and tables are all there are."""
    rows: list[list[str]] = []
    around = ""  # the tag that the next text stands in
    for token in tokens:
        match token.type:
            case "table_open":
                rows = []
            case "tr_open":
                rows.append([])
            case "table_close":
                _table(pages, rows)
            case "bullet_list_close":
                pages.ln(_GAP)
            case "inline" if around in ("td", "th"):
                rows[-1].append("".join(child.content for child in token.children or ()))
            case "inline" if around in _SIZES:
                _heading(pages, around, token.content)
            case "inline":
                _paragraph(pages, token.children or (), listed=token.level > 1)
        around = token.tag or around


def _heading(pages: FPDF, tag: str, text: str) -> None:
    if pages.will_page_break(_WITH_HEADING):
        pages.add_page()
    elif tag != "h1":
        pages.ln(_GAP)
    pages.start_section(text, level=int(tag[1]) - 1)
    pages.set_font(_FONT, "B", _SIZES[tag])
    pages.multi_cell(0, _SIZES[tag] * 0.5, text, align="L", new_x="LMARGIN", new_y="NEXT")
    pages.set_font(_FONT, "", _POINTS)
    pages.ln(_GAP / 2)


def _paragraph(pages: FPDF, parts: Sequence[Token], listed: bool) -> None:
    if listed:
        if pages.will_page_break(_LINE):
            pages.add_page()
        pages.cell(_INDENT, _LINE, "\N{BULLET}")
        pages.set_left_margin(_MARGIN + _INDENT)
    for part in parts:
        if part.type in ("strong_open", "strong_close"):
            pages.set_font(_FONT, "B" if part.nesting > 0 else "", _POINTS)
        pages.write(_LINE, " " if part.type == "softbreak" else part.content)
    pages.set_left_margin(_MARGIN)
    pages.ln(_LINE + (_GAP / 3 if listed else _GAP))


def _table(pages: FPDF, rows: list[list[str]]) -> None:
    """A table whose columns are as wide as their text; its headings return on every page."""
    headed = any(rows[0])
    rows = rows if headed else rows[1:]
    pages.set_font(_FONT, "B", _POINTS)  # the wider face
    wanted = [
        max(pages.get_string_width(row[place]) for row in rows) + 2 * _CELL + 1
        for place in range(len(rows[0]))
    ]
    pages.set_font(_FONT, "", _POINTS)
    widest = pages.epw / len(wanted)
    widths = wanted if sum(wanted) <= pages.epw else [min(each, widest) for each in wanted[:-1]]
    if len(widths) < len(wanted):
        widths.append(pages.epw - sum(widths))  # the last column has what is left, and wraps
    with pages.table(
        rows,
        width=sum(widths),
        col_widths=widths,
        align="LEFT",
        text_align="LEFT",
        v_align="TOP",
        borders_layout="HORIZONTAL_LINES",
        first_row_as_headings=headed,
        line_height=_LINE,
        padding=(0.5, _CELL),
    ):
        pass
    pages.ln(_GAP)
