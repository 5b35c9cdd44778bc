"""Templates: what a report says is data, how it looks is in templates/.

Pages escape whatever they are given (jinja2's autoescape). A template of Markdown escapes by the
filters `md`, in a text, and `code`, between backticks.
"""

from __future__ import annotations

import base64
import functools
import re
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup, escape

from vestige.checks import round_up
from vestige.lab import wording
from vestige.statement.escaping import in_code, in_markdown

_ARXIV = re.compile(r"arXiv[: ](\d{4}\.\d{4,5})")
_CODE = re.compile(r"`([^`]+)`")
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")


def printable(value: Any) -> Any:
    """A text without the characters that neither HTML nor SVG may hold; other values as they are.

    Markup stays markup.
    """
    if not isinstance(value, str):
        return value
    shown = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", value)
    return Markup(shown) if isinstance(value, Markup) else shown


def prose(sentence: str) -> Markup:
    """A sentence as HTML, with its `code` set apart and its arXiv numbers as links."""
    parts = _CODE.split(printable(str(sentence)))
    shown = Markup("")
    for place, piece in enumerate(parts):
        if place % 2:
            shown += Markup("<code>{}</code>").format(piece)
        else:
            address = r'<a href="https://arxiv.org/abs/\1" rel="noreferrer">\g<0></a>'
            shown += Markup(_ARXIV.sub(address, str(escape(piece))))
    return shown


@functools.cache
def _environment() -> Environment:
    made = Environment(
        loader=PackageLoader("vestige.lab"),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        finalize=printable,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    made.filters |= {
        "base64": lambda text: base64.b64encode(text.encode()).decode(),
        "md": in_markdown,
        "code": in_code,
        "prose": prose,
        "epsilon": round_up,
        "images": wording.images,
        "number": wording.number,
        "settings": wording.settings,
        "value": wording.value,
    }
    return made


def markdown(template: str, **values: Any) -> str:
    """A template of Markdown, with one empty line between its parts."""
    text = _environment().get_template(template).render(values)
    return re.sub(r"\n{3,}", "\n\n", text).strip() + "\n"


def html(template: str, **values: Any) -> str:
    """A page."""
    return _environment().get_template(template).render(values).strip() + "\n"
