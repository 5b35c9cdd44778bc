"""Panels with matplotlib: one by one for a page, or all of them in one file."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vestige.audit.palette import GRID, INK, MUTED, PAPER, SHADE, Style
from vestige.lab.report import svg
from vestige.lab.report.markup import Html, printable
from vestige.lab.report.panels import DotPanel, Line, LinePanel, Panel, Plot

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes

# In points. A page shows a panel between two thirds and one and a half times as large.
_WIDTH, _HEIGHT, _DOT_HEIGHT = 470, 300, 23
_MARKERS_PER_LINE = 9
_LONGEST, _LONGEST_TITLE = 34, 52  # characters of a label beside a dot, and above a panel
_BAND = 0.16  # opacity


def elements(plot: Plot, name: str) -> list[Html]:
    """Every panel as an element of a page; `name` makes its ids unique there."""
    from matplotlib.figure import Figure

    drawn = []
    with svg.settings():
        for number, panel in enumerate(plot.panels):
            figure = Figure(figsize=_inches(_WIDTH, _height(panel)), layout="constrained")
            _draw(figure.subplots(), panel)
            description = f"{plot.title}. {panel.description}"
            drawn.append(svg.inline(figure, f"{name}-{number}", description))
    return drawn


def file(plot: Plot) -> str:
    """All panels in one SVG document, with a title and a legend."""
    from matplotlib.figure import Figure
    from matplotlib.layout_engine import ConstrainedLayoutEngine
    from matplotlib.lines import Line2D

    count = len(plot.panels)
    columns = {1: 1, 2: 2, 4: 2}.get(count, 3)
    rows = math.ceil(count / columns)
    key = plot.key
    below = -(-len(key) // columns) * 15 + (15 if plot.hollow else 0)
    tallest = max(_height(panel) for panel in plot.panels)
    with svg.settings():
        size = _inches(columns * _WIDTH, rows * tallest + 24 + below)
        figure = Figure(figsize=size, layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.08))
        axes = figure.subplots(rows, columns, squeeze=False).flatten()
        for panel, place in zip(plot.panels, axes, strict=False):
            _draw(place, panel)
        for place in axes[count:]:
            place.set_axis_off()
        figure.suptitle(_plain(plot.title), fontsize=12, parse_math=False)
        handles: list[Artist] = [
            Line2D([], [], color=s.colour, ls=s.line, marker=s.marker, ms=5, lw=1.6) for _, s in key
        ]
        labels = [_plain(label) for label, _ in key]
        if plot.hollow:
            handles.append(Line2D([], [], **_HOLLOW, color=MUTED, ls="none"))
            labels.append(_plain(plot.hollow))
        if handles:
            legend = figure.legend(
                handles,
                labels,
                loc="outside lower center",
                ncols=min(2 * columns, len(handles)),
                frameon=False,
                handlelength=3.2,
            )
            for shown in legend.get_texts():
                shown.set_parse_math(False)
        description = " ".join(panel.description for panel in plot.panels)
        return svg.document(figure, plot.title, description)


_HOLLOW: dict[str, Any] = {"marker": "D", "ms": 6.0, "mfc": PAPER, "mew": 1.4}


def _inches(width: float, height: float) -> tuple[float, float]:
    return width / 72, height / 72


def _height(panel: Panel) -> float:
    if isinstance(panel, LinePanel):
        return _HEIGHT
    return 58 + _DOT_HEIGHT * max(len(panel.dots), 3)


def _plain(label: str) -> str:
    """A label as it stands: a leading underscore would hide it from the legend."""
    shown = printable(label)
    return f"\N{ZERO WIDTH SPACE}{shown}" if shown.startswith("_") else shown


def _draw(axes: Axes, panel: Panel) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color=GRID, lw=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=3)
    if panel.title:
        title = _shortened(panel.title, _LONGEST_TITLE)
        axes.set_title(title, loc="left", weight="bold", parse_math=False)
    if isinstance(panel, LinePanel):
        _lines(axes, panel)
    else:
        _dots(axes, panel)


def _lines(axes: Axes, panel: LinePanel) -> None:
    if panel.x_log:
        axes.set_xscale("log")
    if panel.y_log:
        axes.set_yscale("log")
    _number_ticks(axes, panel)
    if panel.shaded is not None:
        axes.axhspan(*panel.shaded, color=SHADE, lw=0, zorder=0.5)
    count = len(panel.lines)
    for number, line in enumerate(panel.lines):
        if panel.ticks:
            _apart(axes, line, 0.0 if count == 1 else 0.6 * (number / (count - 1) - 0.5))
            continue
        look = line.style
        every = -(-len(line.x) // _MARKERS_PER_LINE)
        axes.plot(
            line.x,
            line.y,
            color=look.colour,
            ls=look.line,
            marker=look.marker,
            ms=4.5,
            mec=PAPER,
            mew=0.6,
            lw=1.6,
            # Where lines run together, their markers take turns.
            markevery=(every * number // count, every),
        )
        if line.low is not None and line.high is not None:
            axes.fill_between(line.x, line.low, line.high, color=look.colour, alpha=_BAND, lw=0)
    for _, look, x, y in panel.marks:
        axes.plot([x], [y], **_HOLLOW, mec=look.colour, ls="none", clip_on=False, zorder=4)
    if panel.ticks:
        axes.set_xticks(range(len(panel.ticks)), [_plain(tick) for tick in panel.ticks])
        axes.set_xlim(-0.5, len(panel.ticks) - 0.5)
    if panel.floor is not None:
        top = max((max(line.y) for line in panel.lines if len(line.y)), default=0.0)
        # All zero is flat at the bottom of an axis that goes to one.
        axes.set_ylim(panel.floor, None if top > panel.floor else panel.floor + 1)
    axes.set_xlabel(_plain(panel.x_label), parse_math=False)
    axes.set_ylabel(_plain(panel.y_label), parse_math=False)


def _apart(axes: Axes, line: Line, shift: float) -> None:
    """Points with bars, beside their tick."""
    places = [place + shift for place in line.x]
    look = line.style
    if line.low is not None and line.high is not None:
        axes.vlines(places, line.low, line.high, color=look.colour, lw=1.8)
    axes.plot(places, line.y, color=look.colour, ls="none", marker=look.marker, ms=6)


def _number_ticks(axes: Axes, panel: LinePanel) -> None:
    """Powers of ten as plain numbers, since a formula would be set in a font of its own; whole
    numbers where there are no others."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    form = FuncFormatter(lambda value, _: f"{value:g}")
    x = [value for line in panel.lines for value in line.x]
    y = [value for line in panel.lines for value in line.y]
    for axis, log, values in ((axes.xaxis, panel.x_log, x), (axes.yaxis, panel.y_log, y)):
        if log:
            positive = [value for value in values if value > 0]
            if positive and max(positive) < 100 * min(positive):
                axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_major_formatter(form)
            axis.set_minor_formatter(NullFormatter())
    if not panel.x_log and all(float(value).is_integer() for value in x):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, steps=[1, 2, 5, 10]))


def _dots(axes: Axes, panel: DotPanel) -> None:
    places = range(len(panel.dots))
    paired = any(dot.paper is not None for dot in panel.dots)
    up, down = (0.16, 0.2) if paired else (0.0, 0.0)
    for place, dot in zip(places, panel.dots, strict=True):
        look = dot.style
        if dot.value is not None and math.isfinite(dot.value):
            _own(axes, place - up, dot.value, look, panel.bars)
            if dot.low is not None and dot.high is not None:
                over = INK if panel.bars else look.colour
                axes.hlines(place - up, dot.low, dot.high, color=over, lw=1.6)
        if dot.paper is not None:
            if dot.paper_low is not None and dot.paper_high is not None:
                axes.hlines(place + down, dot.paper_low, dot.paper_high, color=MUTED, lw=1.2)
            axes.plot([dot.paper], [place + down], **_HOLLOW, mec=MUTED, ls="none", zorder=3)
        if dot.note:
            _note(axes, place - up, dot.note)
    if panel.reference is not None:
        axes.axvline(panel.reference, color=MUTED, lw=1.0, ls=(0, (4, 3)), zorder=1)
    axes.set_yticks(list(places), [_shortened(dot.label) for dot in panel.dots])
    for shown in axes.get_yticklabels():
        shown.set_parse_math(False)
    axes.set_ylim(len(panel.dots) - 0.4, -0.6)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    axes.margins(x=0.08)
    if panel.bars:
        # Room at the right, for the notes.
        axes.set_xlim(0, 1.14 * axes.get_xlim()[1])
    axes.set_xlabel(_plain(panel.label), parse_math=False)


def _own(axes: Axes, place: float, value: float, look: Style, bar: bool) -> None:
    if bar:
        axes.barh(place, value, height=0.46, color=look.colour, alpha=0.85, lw=0)
    else:
        axes.plot([value], [place], marker=look.marker, ms=6.5, color=look.colour, zorder=3)


def _note(axes: Axes, place: float, note: str) -> None:
    axes.text(
        0.995,
        place,
        _plain(note),
        transform=axes.get_yaxis_transform(),
        ha="right",
        va="center",
        fontsize=9,
        color=MUTED,
    )


def _shortened(label: str, longest: int = _LONGEST) -> str:
    shown = _plain(label)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}\N{HORIZONTAL ELLIPSIS}"
