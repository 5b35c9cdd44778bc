"""Plots with matplotlib and one style file: panels side by side, with a legend for all of them.

Guarantee: the same numbers give the same bytes, whatever is configured. Texts stay texts, and the
layout is computed with the font that matplotlib carries.
"""

from __future__ import annotations

import contextlib
import functools
import io
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.lab.rendering import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Style = Mapping[str, Any]  # colour, line and marker, by matplotlib's names
_WIDTH, _HEIGHT, _DOT_HEIGHT = 470, 300, 23  # of a panel, and of a line of dots, in points
_MARKERS_PER_LINE = 9
_LONGEST, _LONGEST_TITLE = 40, 52  # characters of a label beside a dot, and above a panel
_NAMED = 12  # so many series are described one by one
_SHADE = "#f0f4f8"
_COORDINATES = re.compile(r' (?:d|x|y|points)="[^"]*"')


def style_file() -> Path:
    """The style file of all plots."""
    return Path(str(resources.files("vestige.lab") / "templates" / "report.mplstyle"))


@functools.cache
def looks() -> tuple[Style, ...]:
    """How series are drawn: first a reference, then the others in turn."""
    from matplotlib import rc_params_from_file

    return tuple(rc_params_from_file(style_file(), use_default_template=False)["axes.prop_cycle"])


def reference() -> Style:
    """The look of what others are compared with."""
    return looks()[0]


def quiet(number: int) -> Style:
    """The look of a series among many: thin and grey, so that a few others can be seen.

    Thin, because colours are greys too in print and to some eyes.
    """
    greys = ("#8a949f", "#b4bcc4")
    thin = {"linewidth": 0.9, "markersize": 3.6, "zorder": 1.9}  # below the others
    return {**look(number), **thin, "color": greys[number % len(greys)]}


def look(number: int) -> Style:
    """The look of a series: the same for the same number, different for the first twelve."""
    return looks()[1 + number % (len(looks()) - 1)]


@dataclass(frozen=True)
class Line:
    """A series. `low` and `high` are the edges of its band, or ends of its bars, if it has one.

    `key` is its name in the legend, where that is not its own: lines may share one.
    """

    label: str
    style: Style
    x: Sequence[float]
    y: Sequence[float]
    low: Sequence[float] | None = None
    high: Sequence[float] | None = None
    key: str = ""


@dataclass(frozen=True)
class Dot:
    """A value with its interval, and perhaps the paper's value with its own."""

    label: str
    style: Style
    value: float | None
    ends: tuple[float | None, float | None] = (None, None)
    paper: float | None = None
    paper_ends: tuple[float | None, float | None] = (None, None)
    note: str = ""


@dataclass(frozen=True)
class Panel:
    """What `draw` puts on its axes, and the same in words for those who cannot see it."""

    title: str
    words: str
    draw: Callable[[Axes], None]
    height: float = _HEIGHT
    width: float = _WIDTH


@dataclass(frozen=True)
class Plot:
    """A plot as SVG. Without panels it is empty, and its caption says why."""

    name: str
    title: str
    caption: str
    words: str = ""
    svg: str = ""
    columns: int = 1  # panels side by side


@contextlib.contextmanager
def styled() -> Iterator[None]:
    """While entered, figures have the look of the reports, whatever a user has configured."""
    from matplotlib import style

    with style.context(["default", str(style_file())]):
        yield


def figure_of(title: str, panels: Sequence[Panel]) -> Figure:
    """The panels side by side below a title, with one legend for all of them."""
    from matplotlib.figure import Figure

    columns = columns_of(panels)
    rows = math.ceil(len(panels) / columns)
    tallest = max(panel.height for panel in panels)
    figure = Figure(layout="constrained")
    places = figure.subplots(rows, columns, squeeze=False).flatten()
    for panel, axes in zip(panels, places, strict=False):
        axes.set_title(shortened(panel.title, _LONGEST_TITLE))
        panel.draw(axes)
    for axes in places[len(panels) :]:
        axes.set_axis_off()
    figure.suptitle(plain(title))
    below = _legend(figure, 2 * columns)
    figure.set_size_inches(columns * panels[0].width / 72, (rows * tallest + 24 + below) / 72)
    return figure


def columns_of(panels: Sequence[Panel]) -> int:
    """How many panels stand side by side.

    Small ones are up to four in a row, or else the grid of 3 to 7 columns with the fewest gaps.
    """
    count = len(panels)
    if panels[0].width == _WIDTH:
        return {1: 1, 2: 2, 4: 2, 8: 4}.get(count, 3)
    if count <= 4:
        return count
    return min(range(3, min(count, 8)), key=lambda columns: (-count % columns, -columns))


def plot(
    name: str, title: str, caption: str, panels: Sequence[Panel], empty: str | None = None
) -> Plot:
    """Draw the panels into one SVG document; where there are none, `empty` is all there is."""
    if not panels:
        return Plot(name, title, caption if empty is None else empty)
    words = " ".join(f"{p.title}: {p.words}" if p.title else p.words for p in panels)
    with styled():
        svg = _svg(figure_of(title, panels), title, words)
    return Plot(name, title, caption, words, svg, min(columns_of(panels), 3))


def _legend(figure: Figure, columns: int) -> float:
    """One legend for all panels, unless all there is is one series; returns its height."""
    key: dict[str, Any] = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            key.setdefault(label, handle)
    if len(key) < 2 and all(_is_series(label, handle) for label, handle in key.items()):
        return 0
    figure.legend(key.values(), key, loc="outside lower center", ncols=min(columns, len(key)))
    return 15 * math.ceil(len(key) / columns) + 6


def _is_series(label: str, handle: Any) -> bool:
    """Whether this is a series of ours, which alone needs no name: levels have no markers."""
    return "paper" not in label and handle.get_marker() not in ("None", "none", "", None)


def _svg(figure: Figure, title: str, words: str) -> str:
    buffer = io.StringIO()
    metadata = {"Title": printable(title), "Description": printable(words)}
    metadata |= dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(buffer, format="svg", metadata=metadata)
    # Coordinates to a hundredth of a point: half the size, and nothing that could be seen.
    return _COORDINATES.sub(
        lambda found: re.sub(r"-?\d+\.\d{3,}", lambda n: f"{float(n[0]):.2f}", found[0]),
        buffer.getvalue(),
    )


def plain(label: str) -> str:
    """A label as it stands: a leading underscore would hide it from the legend."""
    shown = str(printable(label))
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown


def shortened(label: str, longest: int = _LONGEST) -> str:
    """A label that fits beside or above its panel."""
    shown = plain(label)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"


def listed(parts: Iterable[str]) -> str:
    """The first dozen of some parts of a sentence, and how many more there are."""
    known = list(parts)
    more = len(known) - _NAMED
    return ", ".join(known[:_NAMED]) + (f", and {more} more" if more > 0 else "") + "."


def line_panel(
    title: str,
    labels: tuple[str, str],
    lines: Sequence[Line],
    *,
    log: bool = False,
    ticks: Sequence[str] = (),
    finish: Callable[[Axes], None] = lambda axes: None,
) -> Panel:
    """Lines over a common axis, described by their last values.

    `ticks` replace the numbers below; with them the values stand apart, with bars for bands.
    `finish` adds whatever else belongs there.
    """

    def draw(axes: Axes) -> None:
        if log:
            axes.set(xscale="log", yscale="log")
        axes.set(xlabel=plain(labels[0]), ylabel=plain(labels[1]))
        for number, line in enumerate(lines):
            (_draw_apart if ticks else _draw_line)(axes, line, number, len(lines))
        _set_ticks(axes, lines, ticks, log)
        finish(axes)

    ends = [f"{line.label}: {line.y[-1]:.4g}" for line in lines]
    at = ticks[-1] if ticks else f"{max(line.x[-1] for line in lines):.4g}"
    return Panel(title, f"{labels[1]} by {labels[0]}; at {at}: {listed(ends)}", draw)


def _draw_line(axes: Axes, line: Line, number: int, count: int) -> None:
    every = math.ceil(len(line.x) / _MARKERS_PER_LINE)
    # Where lines run together, their markers take turns.
    turn = (every * number // count, every)
    label = plain(line.key or line.label) or None
    # Dashes lie above a line that they run along: both are seen.
    style = {"zorder": 2 if line.style["linestyle"] == "-" else 2.05, **line.style}
    axes.plot(line.x, line.y, **style, label=label, markevery=turn, mec="white", mew=0.6)
    if line.low is not None and line.high is not None:
        color = line.style["color"]
        axes.fill_between(line.x, line.low, line.high, color=color, alpha=0.16, lw=0)


def _draw_apart(axes: Axes, line: Line, number: int, count: int) -> None:
    """Points with bars, beside their tick."""
    shift = 0.0 if count == 1 else 0.6 * (number / (count - 1) - 0.5)
    places = [place + shift for place in line.x]
    color = line.style["color"]
    if line.low is not None and line.high is not None:
        axes.vlines(places, line.low, line.high, color=color, lw=1.8)
    looks = {**line.style, "linestyle": "none", "markersize": 6}
    axes.plot(places, line.y, **looks, label=plain(line.label))


def _set_ticks(axes: Axes, lines: Sequence[Line], ticks: Sequence[str], log: bool) -> None:
    """Named ticks; powers of ten as plain numbers; whole numbers where there are no others."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    if ticks:
        axes.set_xticks(range(len(ticks)), [plain(tick) for tick in ticks])
        axes.set_xlim(-0.5, len(ticks) - 0.5)
        return
    values = ([v for line in lines for v in line.x], [v for line in lines for v in line.y])
    if not log:
        if all(float(value).is_integer() for value in values[0]):
            axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))
        return
    for axis, numbers in zip((axes.xaxis, axes.yaxis), values, strict=True):
        positive = [value for value in numbers if value > 0]
        if positive and max(positive) < 100 * min(positive):
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_formatter(NullFormatter())


def shade(axes: Axes, span: Sequence[float]) -> None:
    """Set a range of values off."""
    axes.axhspan(span[0], span[1], color=_SHADE, lw=0, zorder=0.5)


def levels(axes: Axes, known: Mapping[str, float], across: bool = True) -> None:
    """Lines at the accuracies of other models on the same images: the first dotted, by its name.

    One that is far beyond what is drawn is a note at that side: it must not squeeze the rest.
    """
    for number, (label, accuracy) in enumerate(known.items()):
        low, high = axes.get_ylim() if across else axes.get_xlim()
        if number and accuracy > high + (high - low) / 2:
            arrow = "\N{UPWARDS ARROW}" if across else "\N{RIGHTWARDS ARROW}"
            at: Style = {"transform": axes.transAxes, "ha": "right", "va": "bottom", "size": 8.5}
            axes.text(1, 1.01, f"{arrow} {accuracy:.3f}: {label}", **at)
            continue
        draw = axes.axhline if across else axes.axvline
        dashes = (1, 3, 4, 3) if number else (1, 2)
        draw(accuracy, label=label, color="#52606d", lw=1.2, ls=(0, dashes), zorder=1)


def from_zero(axes: Axes) -> None:
    """Let the axis begin at zero; all zero is flat at the bottom of an axis that goes to one."""
    axes.set_ylim(0, None if axes.dataLim.y1 > 0 else 1)


def hollow(axes: Axes, x: float, y: float, color: Any, label: str) -> None:
    """A hollow diamond: a value that is not ours."""
    looks: Style = {"marker": "D", "ms": 6.0, "mfc": "white", "mew": 1.4, "ls": "none"}
    axes.plot([x], [y], **looks, mec=color, clip_on=False, zorder=4, label=label)


def dot_panel(
    title: str,
    label: str,
    dots: Sequence[Dot],
    *,
    bars: bool = False,
    base: float | None = None,
    known: Mapping[str, float] | None = None,
) -> Panel:
    """One value for each line of a list, as a dot or a bar from zero, the paper's below ours.

    `base` is the value of the reference, drawn as a dashed line; `known` are those of other models.
    """

    def draw(axes: Axes) -> None:
        up, down = (0.16, 0.2) if any(dot.paper is not None for dot in dots) else (0.0, 0.0)
        for place, dot in enumerate(dots):
            _draw_dot(axes, dot, place - up, bars)
            _draw_paper(axes, dot, place + down)
        if base is not None:
            axes.axvline(base, color=axes.xaxis.label.get_color(), lw=1.0, ls=(0, (4, 3)), zorder=1)
        levels(axes, known or {}, across=False)
        axes.set_yticks(range(len(dots)), [shortened(dot.label) for dot in dots])
        axes.set_ylim(len(dots) - 0.4, -0.6)
        axes.grid(False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.margins(x=0.08)
        axes.locator_params(axis="x", nbins=6)
        if bars:
            axes.set_xlim(0, 1.14 * axes.get_xlim()[1])  # room for the notes
        axes.set_xlabel(plain(label))

    parts = []
    for dot in dots:
        value = "not run" if dot.value is None else f"{dot.value:.4g}"
        paper = "" if dot.paper is None else f" (paper {dot.paper:.4g})"
        parts.append(f"{dot.label}: {value}{paper}")
    return Panel(title, f"{label}; {listed(parts)}", draw, 58 + _DOT_HEIGHT * max(len(dots), 3))


def _draw_dot(axes: Axes, dot: Dot, place: float, bars: bool) -> None:
    color, (low, high) = dot.style["color"], dot.ends
    if dot.value is not None and bars:
        axes.barh(place, dot.value, height=0.46, color=color, alpha=0.85, lw=0)
    elif dot.value is not None:
        axes.plot([dot.value], [place], marker=dot.style["marker"], ms=6.5, color=color, zorder=3)
    if dot.value is not None and low is not None and high is not None:
        axes.hlines(place, low, high, color=reference()["color"] if bars else color, lw=1.6)
    if dot.note:
        at = axes.get_yaxis_transform()
        axes.text(0.995, place, plain(dot.note), transform=at, ha="right", va="center", size=9)


def _draw_paper(axes: Axes, dot: Dot, place: float) -> None:
    low, high = dot.paper_ends
    color = axes.spines["bottom"].get_edgecolor()
    if dot.paper is not None:
        if low is not None and high is not None:
            axes.hlines(place, low, high, color=color, lw=1.2)
        hollow(axes, dot.paper, place, color, "the paper's value")
