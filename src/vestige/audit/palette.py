"""Colours and marks that survive print and colour blindness.

The colours are those of Okabe and Ito (2008) without yellow, which is lost on paper; a reference is
in ink. Neighbouring series differ in line style and marker too, so that a page without colours can
still be read. In HTML every colour is a variable, with a lighter twin for dark screens.
"""

from __future__ import annotations

from dataclasses import dataclass

INK, MUTED, GRID, PAPER = "#1d2530", "#5c6773", "#e3e7ec", "#ffffff"
SHADE = "#f0f4f8"

# blue, vermillion, bluish green, reddish purple, orange, sky blue
SERIES = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_DARK = ("#5aaee6", "#f2884b", "#2fc79b", "#e6a3c6", "#f5bd4f", "#9ad3f5")
_LINES = ("-", "--", "-.", ":")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")

LIGHT = {"ink": INK, "muted": MUTED, "grid": GRID, "paper": PAPER, "shade": SHADE} | {
    f"series-{i}": colour for i, colour in enumerate(SERIES)
}
DARK = {
    "ink": "#e4e9ef",
    "muted": "#9aa6b2",
    "grid": "#2c343d",
    "paper": "#12161b",
    "shade": "#1a2027",
} | {f"series-{i}": colour for i, colour in enumerate(_DARK)}


@dataclass(frozen=True)
class Style:
    """How a series is drawn. `line` and `marker` are matplotlib's names."""

    colour: str
    line: str
    marker: str

    @property
    def words(self) -> str:
        """The style for those who cannot see it."""
        line = {"-": "solid", "--": "dashed", "-.": "dash-dotted", ":": "dotted"}[self.line]
        marker = {
            "o": "circles",
            "s": "squares",
            "^": "upward triangles",
            "D": "diamonds",
            "v": "downward triangles",
            "P": "plus signs",
            "X": "crosses",
        }[self.marker]
        return f"{line} line with {marker}"


REFERENCE = Style(INK, "-", "o")


def style(number: int) -> Style:
    """The style of a series: the same for the same number, different for the first twelve."""
    return Style(
        SERIES[number % len(SERIES)],
        # Shifted after each round of colours: a colour comes back with another line and marker.
        _LINES[(number + number // len(SERIES)) % len(_LINES)],
        _MARKERS[(number + 1) % len(_MARKERS)],
    )


def variables(colours: dict[str, str]) -> str:
    """The colours as CSS variables."""
    return "".join(f"--{name}:{colour};" for name, colour in colours.items())
