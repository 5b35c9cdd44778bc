"""Small drawings inside text and tables: keys of legends, and intervals beside their numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from vestige.audit.palette import LIGHT, Style
from vestige.lab.report.markup import Html, element, text

_DASHES = {"-": "", "--": "6 3", "-.": "7 3 1.5 3", ":": "1.5 2.5"}
_SHAPES = {
    "o": '<circle cx="{x}" cy="{y}" r="3.2"/>',
    "s": '<path d="M{x} {y}m-3-3h6v6h-6z"/>',
    "^": '<path d="M{x} {y}m0-3.6l3.6 6.4h-7.2z"/>',
    "v": '<path d="M{x} {y}m0 3.6l3.6-6.4h-7.2z"/>',
    "D": '<path d="M{x} {y}m0-4l4 4l-4 4l-4-4z"/>',
    "P": '<path d="M{x} {y}m-1.4-4h2.8v2.6h2.6v2.8h-2.6v2.6h-2.8v-2.6h-2.6v-2.8h2.6z"/>',
    "X": '<path d="M{x} {y}m0-1.8l1.9-1.9l1.8 1.8l-1.9 1.9l1.9 1.9l-1.8 1.8l-1.9-1.9l-1.9 1.9'
    'l-1.8-1.8l1.9-1.9l-1.9-1.9l1.8-1.8z"/>',
}
_NAMES = {colour: name for name, colour in LIGHT.items()}
_WIDTH, _HEIGHT = 150, 22


def legend(key: Sequence[tuple[str, Style]], hollow: str) -> Html:
    """The series of a plot, and what hollow diamonds stand for."""
    items = [element("li", _swatch(style), element("span", label)) for label, style in key]
    if hollow:
        mark = (
            '<path d="M13 7m0-4.6l4.6 4.6l-4.6 4.6l-4.6-4.6z" fill="none" stroke="var(--muted)"/>'
        )
        items.append(element("li", _svg(26, 14, "hollow diamond", mark), element("span", hollow)))
    return element("ul", *items, class_="legend") if items else Html("")


def _swatch(style: Style) -> Html:
    colour = f"var(--{_NAMES[style.colour]})"
    dash = f' stroke-dasharray="{_DASHES[style.line]}"' if _DASHES[style.line] else ""
    line = f'<path d="M1 7h32" stroke="{colour}" stroke-width="2"{dash}/>'
    shape = _SHAPES[style.marker].format(x=17, y=7)
    return _svg(34, 14, style.words, f'{line}<g fill="{colour}">{shape}</g>')


def _svg(width: float, height: float, description: str, content: str) -> Html:
    return Html(
        f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{text(description)}">{content}</svg>'
    )


@dataclass(frozen=True)
class Interval:
    """A value with its interval, where it has one."""

    value: float
    low: float | None = None
    high: float | None = None

    @property
    def ends(self) -> tuple[float, float]:
        """The interval, or the value alone."""
        if self.low is None or self.high is None:
            return self.value, self.value
        return self.low, self.high

    @property
    def words(self) -> str:
        """The interval in words."""
        if self.low is None or self.high is None:
            return f"{self.value:.4g}"
        return f"{self.value:.4g}, from {self.low:.4g} to {self.high:.4g}"


class Strips:
    """Intervals of the lines of a table on one scale: ours above, the paper's below it."""

    def __init__(self, intervals: Sequence[Interval | None], reference: float | None) -> None:
        ends = [end for interval in intervals if interval for end in interval.ends]
        known = [end for end in ends if math.isfinite(end)]
        low, high = (min(known), max(known)) if known else (0.0, 1.0)
        room = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
        self.low, self.high = low - room, high + room
        self._reference = reference

    def strip(self, ours: Interval | None, paper: Interval | None) -> Html:
        """The drawing for one line."""
        parts = []
        if self._reference is not None:
            x = self._place(self._reference)
            parts.append(
                f'<path d="M{x} 0v{_HEIGHT}" stroke="var(--muted)" stroke-dasharray="3 3"/>'
            )
        words = []
        if ours is not None:
            y = 6 if paper is not None else 11
            parts.append(self._bar(ours, y, "var(--accent)", 2.2))
            parts.append(
                f'<circle cx="{self._place(ours.value)}" cy="{y}" r="3.6" fill="var(--accent)"/>'
            )
            words.append(f"ours {ours.words}")
        if paper is not None:
            y = 16 if ours is not None else 11
            x = self._place(paper.value)
            parts.append(self._bar(paper, y, "var(--muted)", 1.4))
            parts.append(
                f'<path d="M{x} {y}m0-4l4 4l-4 4l-4-4z" fill="var(--paper)" stroke="var(--muted)" '
                'stroke-width="1.4"/>'
            )
            words.append(f"the paper {paper.words}")
        return _svg(_WIDTH, _HEIGHT, "; ".join(words) or "no value", "".join(parts))

    def _bar(self, interval: Interval, y: float, colour: str, width: float) -> str:
        low, high = interval.ends
        if low == high:
            return ""
        start, end = self._place(low), self._place(high)
        return f'<path d="M{start} {y}H{end}" stroke="{colour}" stroke-width="{width}"/>'

    def _place(self, value: float) -> float:
        share = (value - self.low) / (self.high - self.low)
        return round(5 + min(max(share, 0.0), 1.0) * (_WIDTH - 10), 1)
