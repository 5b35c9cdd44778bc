"""One table, three readers: nothing in a cell is obeyed by any of them."""

from __future__ import annotations

import io
from html.parser import HTMLParser

from rich.console import Console

from vestige.statement.table import Table

HOSTILE = "<b>[red]`x`|</td>"
TABLE = Table(["method", "gain"], [["DP-SGD", "+0.1"], [HOSTILE, "-"]], "A & B")


def test_markdown() -> None:
    lines = TABLE.markdown().splitlines()
    assert lines[:3] == ["| method | gain |", "|---|---|", "| DP-SGD | +0.1 |"]
    assert "`" not in lines[3] and "\\|" in lines[3] and "<b>" not in lines[3]


def test_html() -> None:
    tags: list[tuple[str, dict[str, str | None]]] = []
    words: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
            tags.append((tag, dict(attrs)))

        def handle_data(self, data: str) -> None:
            words.append(data)

    Reader().feed(str(TABLE.html()))
    assert words == ["A & B", "method", "gain", "DP-SGD", "+0.1", HOSTILE, "-"]
    assert [tag for tag, _ in tags].count("th") == 4 and "b" not in [tag for tag, _ in tags]
    assert ("td", {"class": "number"}) in tags and ("th", {"scope": "row"}) in tags
    assert tags[0][1]["aria-label"] == "A & B"


def test_rich() -> None:
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(TABLE.rich())
    shown = console.export_text()
    assert HOSTILE in shown and "A & B" in shown and "+0.1" in shown
