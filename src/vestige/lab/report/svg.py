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

from vestige.audit.palette import INK, LIGHT, MUTED, PAPER
from vestige.lab.report.markup import Html, text

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_LAYOUT_FONT = "DejaVu Sans"
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
_SETTINGS = {
    "svg.fonttype": "none",
    "svg.hashsalt": "vestige",
    "font.family": [_LAYOUT_FONT],
    "font.size": 11.0,
    "xtick.labelsize": 10.0,
    "ytick.labelsize": 10.0,
    "legend.fontsize": 10.0,
    "text.color": INK,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.linewidth": 0.8,
    "axes.titlesize": 11.5,
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
_GROUP_ID = re.compile(r'<g id="[^"]*"')
_NO_TURN = re.compile(r' transform="rotate\(-0 [^"]*"')
_STYLE = re.compile(r' style="[^"]*"')
_COLOURS = {colour: f"var(--{name})" for name, colour in LIGHT.items()}
_COLOUR = re.compile("|".join(re.escape(colour) for colour in _COLOURS))


@contextlib.contextmanager
def settings() -> Iterator[None]:
    """While entered, figures have the look of the reports, whatever a user has configured."""
    from matplotlib import style

    with style.context(["default", _SETTINGS]):
        yield


def document(figure: Figure, title: str, description: str) -> str:
    """A file of its own, on paper white; title and description are for those who cannot see it."""
    drawn = _small(_drawn(figure)).replace(f"'{_LAYOUT_FONT}'", FONTS)
    start, end, rest = drawn.partition('version="1.1">')
    words = f"\n<title>{text(title)}</title>\n<desc>{text(description)}</desc>"
    return f'{start}role="img" {end}{words}{rest}'


def inline(figure: Figure, name: str, description: str) -> Html:
    """An element of a page: its colours are the page's variables, its ids are the page's own.

    `description` is what those hear or read who cannot see it.
    """
    drawn = _small(_drawn(figure, transparent=True))
    head, _, rest = drawn[drawn.index("<svg") :].partition(">")
    box = re.search(r'viewBox="([^"]*)"', head)
    assert box is not None
    # The style sheet inside would speak to the whole page.
    rest = re.sub(r"<style[^>]*>.*?</style>", "", rest, flags=re.DOTALL)
    rest = _GROUP_ID.sub("<g", rest)
    rest = _ID.sub(lambda found: f"{found[1]}{name}-", rest).replace("xlink:href", "href")
    rest = _STYLE.sub(lambda found: _themed(found[0]), rest)
    label = f'role="img" aria-label="{text(description)}"'
    return Html(f'<svg class="plot" viewBox="{box[1]}" {label}>{rest.strip()}')


def _themed(styled: str) -> str:
    fitted = styled.replace(f" font-family: '{_LAYOUT_FONT}';", "")
    return _COLOUR.sub(lambda found: _COLOURS[found[0]], fitted)


def _drawn(figure: Figure, transparent: bool = False) -> str:
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata=_NO_METADATA, transparent=transparent)
    return buffer.getvalue()


def _small(drawn: str) -> str:
    """Coordinates to a hundredth of a point: half the size, and nothing that could be seen."""
    rounded = _COORDINATES.sub(lambda found: _rounded(found[0]), _NO_TURN.sub("", drawn))
    return re.sub(r"\n +<", "\n<", rounded)


def _rounded(coordinates: str) -> str:
    short = _NUMBER.sub(lambda n: f"{float(n[0]):.2f}", coordinates)
    return re.sub(r" ?\n", "", short)
