"""From a matplotlib figure to SVG text: the same bytes for the same figure.

Texts stay texts, so that they can be searched, read aloud and set in the reader's own font. The
layout is computed with the font that matplotlib carries, whatever else is installed.
"""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vestige.report.markup import Html, text
from vestige.report.palette import INK, LIGHT, MUTED, PAPER

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYOUT_FONT = "DejaVu Sans"
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vestige",
    "font.family": [_LAYOUT_FONT],
    "font.size": 10.0,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 11.0,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "figure.facecolor": PAPER,
    "axes.facecolor": "none",
}
# What would be the time, and a link to matplotlib.
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}

_NUMBER = re.compile(r"-?\d+\.\d{3,}")
_COORDINATES = re.compile(r' (?:d|x|y|points)="[^"]*"')
_ID = re.compile(r'( id="|url\(#|href="#)')
_COLOURS = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
_COLOUR = re.compile("|".join(re.escape(colour) for colour in _COLOURS))


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """While entered, figures have the look of the reports, whatever a user has configured."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]):
        yield


def document(figure: Figure) -> str:
    """A file of its own, on paper white."""
    drawn = _rounded(_drawn(figure))
    return drawn.replace(f"'{_LAYOUT_FONT}'", FONTS)


def inline(figure: Figure, name: str, description: str) -> Html:
    """An element of a page: its colours are the page's variables, its ids are the page's own.

    `description` is what those hear or read who cannot see it.
    """
    drawn = _rounded(_drawn(figure, transparent=True)).replace(f"'{_LAYOUT_FONT}'", "inherit")
    body = drawn[drawn.index("<svg") :]
    head, _, rest = body.partition(">")
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None
    # The style sheet inside speaks to the whole page once it stands in one.
    rest = re.sub(r"<style[^>]*>.*?</style>", "", rest, flags=re.DOTALL)
    rest = _ID.sub(lambda found: f"{found[1]}{name}-", rest).replace("xlink:href", "href")
    rest = _COLOUR.sub(lambda found: _COLOURS[found[0]], rest)
    label = f'role="img" aria-label="{text(description)}"'
    return Html(f'<svg class="plot" viewBox="{box[1]}" {label}>{rest.strip()}')


def _drawn(figure: Figure, transparent: bool = False) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA, transparent=transparent)
    return buffer.getvalue()


def _rounded(drawn: str) -> str:
    """Coordinates to a hundredth of a point: half the size, and nothing that could be seen."""
    return _COORDINATES.sub(
        lambda found: _NUMBER.sub(lambda n: f"{float(n[0]):.2f}", found[0]), drawn
    )
