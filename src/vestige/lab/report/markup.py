"""HTML as text that cannot be mistaken for other text: plain strings are escaped, `Html` is not.

Every page is built with `element`, so that what a label, a path or a row says is always shown and
never obeyed.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

_VOID = ("br", "hr", "img", "link", "meta", "wbr")
_ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")
_CODE = re.compile(r"`([^`]+)`")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


class Html(str):
    """Markup that is already safe. Made by `element` and `join` alone."""

    __slots__ = ()


def printable(value: object) -> str:
    """A value as text without the characters that neither HTML nor SVG may hold."""
    return _CONTROL.sub("\N{REPLACEMENT CHARACTER}", str(value))


def text(value: object) -> Html:
    """A value as markup: escaped, unless it is markup already."""
    return value if isinstance(value, Html) else Html(html.escape(printable(value), quote=True))


def join(parts: Iterable[object], between: str = "") -> Html:
    """The parts one after another, each of them escaped where it is not markup."""
    return Html(str(text(between)).join(text(part) for part in parts))


def element(name: str, /, *children: object, **attributes: object) -> Html:
    """An element. `class_` stands for class, `_` in other names for `-`; None and False are left
    out, True is an attribute without a value."""
    written = []
    for key, value in attributes.items():
        if value is None or value is False:
            continue
        label = key.rstrip("_").replace("_", "-")
        written.append(label if value is True else f'{label}="{text(value)}"')
    head = " ".join([name, *written])
    if name in _VOID:
        return Html(f"<{head}>")
    return Html(f"<{head}>{join(children)}</{name}>")


def prose(sentence: str) -> Html:
    """A sentence with its `code` and its arXiv numbers as links."""
    parts: list[object] = []
    for i, piece in enumerate(_CODE.split(sentence)):
        parts.append(element("code", piece) if i % 2 else _linked(piece))
    return join(parts)


def _linked(piece: str) -> Html:
    parts: list[object] = []
    end = 0
    for found in _ARXIV.finditer(piece):
        parts.append(piece[end : found.start()])
        address = f"https://arxiv.org/abs/{found[1]}"
        parts.append(element("a", found[0], href=address, rel="noreferrer"))
        end = found.end()
    return join([*parts, piece[end:]])


@dataclass(frozen=True)
class Column:
    """A column of a table. Numbers are set to the right, in figures of equal width."""

    heading: object
    number: bool = True


def table(
    caption: object,
    columns: Sequence[Column],
    lines: Sequence[Sequence[object]],
    marked: Iterable[int] = (),
) -> Html:
    """A table whose first column names its lines; wide ones scroll inside their frame.

    `marked` are the indices of lines to be set apart.
    """
    chosen = set(marked)
    head = [_cell("th", column, column.heading, scope="col") for column in columns]
    body = []
    for number, line in enumerate(lines):
        cells = [
            _cell("td" if i else "th", column, value, scope=None if i else "row")
            for i, (column, value) in enumerate(zip(columns, line, strict=True))
        ]
        body.append(element("tr", *cells, class_="marked" if number in chosen else None))
    whole = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *head)),
        element("tbody", *body),
    )
    plain = re.sub(r"<[^>]*>", "", text(caption))
    # A frame that scrolls must be reachable with the keyboard, and then it needs a name.
    return element(
        "div", whole, class_="scroll", tabindex="0", role="region", aria_label=Html(plain)
    )


def _cell(name: str, column: Column, value: object, scope: str | None) -> Html:
    return element(name, value, scope=scope, class_="number" if column.number else None)


def pairs(values: Iterable[tuple[object, object]]) -> Html:
    """Names with their values."""
    items = [element("div", element("dt", k), element("dd", v)) for k, v in values]
    return element("dl", *items, class_="pairs")


def bullets(values: Iterable[object], class_: str | None = None) -> Html:
    """A list without an order."""
    return element("ul", *(element("li", value) for value in values), class_=class_)


def details(summary: object, *content: object) -> Html:
    """What is folded until it is asked for."""
    return element("details", element("summary", summary), *content)


def section(anchor: str, title: str, *content: object) -> Html:
    """A part of a page, with an anchor."""
    label = f"{anchor}-title"
    return element(
        "section", element("h2", title, id=label), *content, id=anchor, aria_labelledby=label
    )
