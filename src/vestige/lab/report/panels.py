"""What a plot shows, as data: panels of lines or of dots, before anything is drawn.

The words for those who cannot see a panel are made from the same numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vestige.audit.palette import Style

_NAMED = 12  # so many series are described one by one


@dataclass(frozen=True)
class Line:
    """A series. `low` and `high` are the edges of its band, or ends of its bars, if it has one."""

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None


@dataclass(frozen=True)
class Dot:
    """A value with its interval, and perhaps the paper's value with its own."""

    label: str
    style: Style
    value: float | None
    low: float | None = None
    high: float | None = None
    paper: float | None = None
    paper_low: float | None = None
    paper_high: float | None = None
    note: str = ""


@dataclass(frozen=True)
class LinePanel:
    """Lines over a common axis.

    `ticks` replace the numbers below; with them the values stand apart, with bars for bands.
    `marks` are single points (label, style, x, y), hollow. `shaded` is a range of y that is set
    off, `floor` where y begins.
    """

    title: str
    x_label: str
    y_label: str
    lines: Sequence[Line]
    x_log: bool = False
    y_log: bool = False
    ticks: Sequence[str] = ()
    marks: Sequence[tuple[str, Style, float, float]] = ()
    shaded: tuple[float, float] | None = None
    floor: float | None = None

    @property
    def description(self) -> str:
        """The panel in words, with the last value of every line."""
        ends = [f"{line.label}: {line.y[-1]:.4g}" for line in self.lines if len(line.y)]
        at = self.ticks[-1] if self.ticks else f"{max(line.x[-1] for line in self.lines):.4g}"
        words = f"{self.y_label} by {self.x_label}"
        return f"{_titled(self.title)}{words}; at {at}: {_listed(ends)}"


@dataclass(frozen=True)
class DotPanel:
    """One value for each line of a list, as a dot, or as a bar from zero."""

    title: str
    label: str
    dots: Sequence[Dot]
    bars: bool = False
    reference: float | None = None

    @property
    def description(self) -> str:
        """The panel in words, with every value."""
        parts = []
        for dot in self.dots:
            own = "not run" if dot.value is None else f"{dot.value:.4g}"
            paper = "" if dot.paper is None else f" (paper {dot.paper:.4g})"
            parts.append(f"{dot.label}: {own}{paper}")
        return f"{_titled(self.title)}{self.label}; {_listed(parts)}"


Panel = LinePanel | DotPanel


@dataclass(frozen=True)
class Plot:
    """A named plot of one or more panels. Without panels, `caption` says why there are none."""

    name: str
    title: str
    caption: str
    panels: Sequence[Panel] = field(default=())

    @property
    def key(self) -> list[tuple[str, Style]]:
        """The series that need a legend, each once."""
        found: dict[str, Style] = {}
        for panel in self.panels:
            if isinstance(panel, LinePanel):
                found |= {line.label: line.style for line in panel.lines if line.label}
        return list(found.items()) if len(found) > 1 else []

    @property
    def hollow(self) -> str:
        """What hollow diamonds stand for; empty where there are none."""
        for panel in self.panels:
            if isinstance(panel, LinePanel) and panel.marks:
                return panel.marks[0][0]
            if isinstance(panel, DotPanel) and any(d.paper is not None for d in panel.dots):
                return "the paper's value"
        return ""


def _titled(title: str) -> str:
    return f"{title}: " if title else ""


def _listed(parts: Iterable[str]) -> str:
    known = list(parts)
    more = len(known) - _NAMED
    return ", ".join(known[:_NAMED]) + (f", and {more} more" if more > 0 else "") + "."
