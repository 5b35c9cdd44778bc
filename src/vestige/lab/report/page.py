"""The frame of a report: one HTML file that needs nothing else, not even scripting.

A content security policy forbids whatever is not in the file itself: scripts, and anything from
the network. Pages of the same numbers are the same bytes.
"""

from __future__ import annotations

import base64
import gzip
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources

from vestige.audit.palette import DARK, LIGHT, variables
from vestige.lab.report import draw
from vestige.lab.report.glyphs import legend
from vestige.lab.report.markup import Html, element, join, prose, section
from vestige.lab.report.panels import Plot

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:; base-uri 'none'"
_ACCENT = {"accent": LIGHT["series-0"], "warning": "#a84300", "edge": "#1d253026"}
_DARK_ACCENT = {"accent": DARK["series-0"], "warning": "#f2884b", "edge": "#000000a0"}


@dataclass(frozen=True)
class Section:
    """A part of a page: its anchor, its title and what it holds."""

    anchor: str
    title: str
    content: Sequence[object] = field(default=())


def page(
    kind: str, title: str, lead: object, notices: Iterable[object], sections: Sequence[Section]
) -> str:
    """A whole page. `kind` says what is reported, `notices` stand above everything."""
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        element("meta", name="color-scheme", content="light dark"),
        element("meta", name="generator", content="Vestige"),
        element("title", f"{title} | {kind}"),
        element("link", rel="icon", href="data:,"),
        Html(f"<style>{_styles()}</style>"),
    )
    links = [element("li", element("a", s.title, href=f"#{s.anchor}")) for s in sections]
    top = element(
        "header",
        element("p", kind, class_="eyebrow"),
        element("h1", title),
        element("p", lead, class_="lead") if lead else "",
        *notices,
        element("nav", element("ul", *links), aria_label="Parts of this page"),
    )
    body = element(
        "body",
        element("a", "To the content", href="#content", class_="skip"),
        top,
        element("main", *(section(s.anchor, s.title, *s.content) for s in sections), id="content"),
        element("footer", "A page of Vestige. It loads nothing and runs no script."),
    )
    return f"<!DOCTYPE html>\n{element('html', head, body, lang='en')}\n"


def _styles() -> str:
    sheet = resources.files("vestige.lab.report").joinpath("page.css").read_text(encoding="utf-8")
    light, dark = variables(LIGHT | _ACCENT), variables(DARK | _DARK_ACCENT)
    # Paper is white, whatever the screen prefers.
    return (
        f":root{{{light}}}\n"
        f"@media screen and (prefers-color-scheme: dark){{:root{{{dark}}}}}\n{sheet}"
    )


def card(*content: object, warning: bool = False) -> Html:
    """Something that must not be overlooked."""
    return element("div", *content, class_="card warning" if warning else "card")


def figure(plot: Plot, made_by: str) -> Html:
    """A plot with its legend and caption; `made_by` is the command that draws its file again."""
    if not plot.panels:
        return element(
            "figure", element("h3", plot.title), element("figcaption", prose(plot.caption))
        )
    panels = draw.elements(plot, plot.name)
    file = join(["File: ", element("code", f"{plot.name}.svg"), ", made by ", _command(made_by)])
    return element(
        "figure",
        element("h3", plot.title),
        legend(plot.key, plot.hollow),
        element("div", *panels, class_="panels"),
        element("figcaption", prose(plot.caption), " ", file, "."),
        class_="single" if len(panels) == 1 else None,
    )


def _command(command: str) -> Html:
    return element("code", command)


def download(label: str, file: str, content: bytes, packed: bool = False) -> Html:
    """A link that saves `content` as a file: it is in the page. `packed` is gzip."""
    kind, data = "text/plain;charset=utf-8", content
    if packed:
        # Without a time stamp, so that the page stays the same.
        kind, data = "application/gzip", gzip.compress(content, 9, mtime=0)
    address = f"data:{kind};base64,{base64.b64encode(data).decode()}"
    size = f" ({max(1, round(len(data) / 1024)):,} kB)"
    return join([element("a", label, href=address, download=file), size])
