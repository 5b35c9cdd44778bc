"""`vestige plan`: the noises that a training could use, as a table, in words and as a plot.

Guarantee: like the comparison, a function of public numbers alone; no record is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from vestige.audit.plot_files import check_plot, write_plot
from vestige.cli.options import Json, options_of
from vestige.cli.render import print_json, wide_console
from vestige.methods.noise_forms import FRACTIONAL, INVERSE, TREE
from vestige.methods.planning import (
    MIN_GAIN,
    ORDERS,
    Comparison,
    Request,
    Row,
    available,
    compare,
)
from vestige.privacy import accounting

# A column of the table: the field of a row, and its form.
_COLUMNS = {
    "rate": ("sample_rate", ".3g"),
    "events": ("events", "d"),
    "noise\nmult.": ("noise_multiplier", ".4g"),
    "prefix\nerror": ("prefix_error", ".4g"),
    "ratio": ("ratio", ".3f"),
    "max": ("prefix_max", ".4g"),
    "one\nstep": ("step_noise", ".4g"),
    "mem.": ("memory", "d"),
}
_NAMES = {FRACTIONAL: "fractional noise", INVERSE: "a banded inverse"}
_COLORS = ("#e9a820", "#7fb069", "#2a9d8f", "#1f5fa8", "#3d1a5b")  # one per order
_CHOICE, _LINE, _OUT = "#d1495b", "#555555", "#f2f2f2"


@options_of(Request)
def plan(
    request: Request,
    plot: Annotated[
        Path | None, typer.Option(help="Where to plot bands and orders (.png, .pdf, .svg).")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare the noises at one epsilon, and say which to use."""
    if plot is not None:
        check_plot(plot)
    with Console(stderr=True).status("calibrating the noise") as status:
        comparison = compare(request, status.update)
    if as_json:
        print_json(comparison.as_dict())
    else:
        console = wide_console()
        console.print(table(comparison))
        for line in words(comparison):
            console.print(f"\n{line}", markup=False)
    if plot is not None:
        draw(comparison, plot)
        if not as_json:
            typer.echo(f"\nplot  {plot}")


def title(comparison: Comparison) -> str:
    """The training and its guarantee."""
    request = comparison.request
    accountant = accounting.accountant_name(request.accountant)
    epochs = "epoch" if request.epochs == 1 else "epochs"
    return (
        f"{request.dataset_size:,} records, lot {request.lot:,}, {request.epochs:,} {epochs} "
        f"({request.steps:,} steps), epsilon {request.epsilon:g}, delta {request.delta:g} "
        f"({accountant})"
    )


def table(comparison: Comparison) -> Table:
    """DP-SGD, the filters, and the best order for each number of bands."""
    shown = Table(
        box=SIMPLE_HEAD, padding=0, show_edge=False, title=title(comparison), title_justify="left"
    )
    shown.add_column("method, bands")
    shown.add_column("ampl.")
    for heading in _COLUMNS:
        shown.add_column(heading, justify="right")
    for row in _shown(comparison):
        figures = [format(getattr(row, name), form) for name, form in _COLUMNS.values()]
        style = "bold" if row == comparison.recommended else None
        shown.add_row(_label(row), "yes" if row.amplified else "no", *figures, style=style)
    return shown


def _label(row: Row) -> str:
    """Method and main setting, short enough for a table of eighty characters."""
    if row.method == FRACTIONAL:
        return f"fractional {row.order:g}, {row.bands}"
    if row.method == INVERSE:
        return f"{row.method}, {row.bands}"
    if row.method == TREE:
        return f"{row.method} *"
    weight = row.settings.get("beta", row.settings.get("momentum"))
    return row.method if weight is None else f"{row.method} {weight:g}"


def settings(row: Row) -> str:
    """The row's settings in words."""
    return ", ".join(f"{name} {value:g}" for name, value in row.settings.items())


def words(comparison: Comparison) -> list[str]:
    """What to use, what it gains and costs, and what the filters do and do not."""
    lines = [
        "Prefix error: the accumulated noise, per coordinate of the sum of releases, in clipping "
        "norms, root mean square over the steps; ratio: to DP-SGD's; max: at the noisiest step. "
        "One step: the noise of a release. Ampl.: whether sampling lowers the multiplier. Mem.: "
        "vectors of the model's size.",
        _advice(comparison),
    ]
    chosen = comparison.recommended
    if chosen.method in _NAMES:
        louder = chosen.step_noise / comparison.baseline.step_noise
        lines.append(
            f"A single step is {louder:.1f} times as noisy as DP-SGD's: the noise of later steps "
            "takes that of earlier ones back. This suits plain gradient descent, whose weights are "
            "the sum of the steps; an optimizer that rescales each step, such as Adam, undoes it."
        )
    if comparison.fractional and not available(FRACTIONAL):
        lines.append(
            "Fractional noise is planned: this version cannot train with it yet. Until it can, "
            "train with dp-sgd."
        )
    lines.append(_on_filters(comparison.filters, comparison.baseline))
    if comparison.fractional:
        lines.append(
            "Fractional noise with b bands: the records are split at random into b groups that "
            "take turns, so a record can be drawn in every b-th lot only, at b times the rate."
        )
    lines.append(
        "A banded inverse with b bands: the records are split into as many groups as an epoch has "
        "lots, one Gaussian covers the run, and a step makes b draws again instead of keeping them."
    )
    lines += [
        f"* {row.method}: for another relation ({row.adjacency}), so no candidate."
        for row in comparison.of(TREE)
    ]
    return lines


def _advice(comparison: Comparison) -> str:
    request, best, chosen = comparison.request, comparison.best, comparison.recommended
    limit = "" if request.max_memory is None else f" within {_vectors(request.max_memory)}"
    if best is None:
        return "Use DP-SGD: a single step has no earlier noise that it could take back."
    cost = (
        f"keeps {_vectors(best.memory)} of the model's size"
        if best.memory
        else "keeps no earlier noise"
    )
    if best.method == INVERSE:
        cost += f" and makes {best.bands} draws a step"
    if chosen == best:
        return (
            f"Use {_NAMES[best.method]}, {settings(best)}: at the same epsilon its accumulated "
            f"noise is {best.ratio:.3f} of DP-SGD's ({1 - best.ratio:.1%} less), the least "
            f"found{limit}. It {cost}; DP-SGD keeps no vector and makes one draw."
        )
    return (
        f"Use DP-SGD, the simplest: the best correlated noise{limit} ({_NAMES[best.method]}, "
        f"{settings(best)}) has {best.ratio:.3f} of its accumulated noise at the same epsilon, a "
        f"gain below the {MIN_GAIN:.0%} that would be worth what it costs: it {cost}."
    )


def _on_filters(filters: Iterable[Row], baseline: Row) -> str:
    facts = "; ".join(
        f"{row.method}: one step {row.step_noise / baseline.step_noise:.3f}, accumulated "
        f"{row.ratio:.3f} of DP-SGD's, {row.delay:.1f} steps late"
        for row in filters
    )
    return (
        "Momentum, FO and SMA (gates open) filter signal and noise alike after the release. They "
        f"smooth single steps, they do not lower accumulated noise ({facts}): what is below 1 is "
        "the delay, and the signal is as late. They are not candidates here."
    )


def _vectors(count: int) -> str:
    return f"{count} vector" if count == 1 else f"{count} vectors"


def _shown(comparison: Comparison) -> list[Row]:
    leading: dict[int, Row] = {}
    for row in comparison.fractional:
        if row.bands not in leading or row.ratio < leading[row.bands].ratio:
            leading[row.bands] = row
    others = comparison.of(INVERSE, TREE)
    return [comparison.baseline, *comparison.filters, *leading.values(), *others]


def draw(comparison: Comparison, path: Path) -> None:
    """The ratio of the accumulated noise to DP-SGD's against the bands, one line per order."""
    from matplotlib.figure import Figure
    from matplotlib.ticker import NullLocator

    figure = Figure(figsize=(7.0, 4.4), layout="constrained")
    axes = figure.subplots()
    axes.set_xscale("log", base=2)
    inverses = comparison.of(INVERSE)
    bands = [1, *sorted({row.bands for row in comparison.fractional})]
    for order, color in zip(ORDERS, _COLORS, strict=True):
        line = [1.0, *(row.ratio for row in comparison.fractional if row.order == order)]
        if len(line) > 1:
            axes.plot(bands, line, "o-", ms=4, lw=1.5, color=color, label=f"order {order:g}")
    ratios = [row.ratio for row in inverses]
    others = [row.bands for row in inverses]
    axes.plot(others, ratios, "s:", ms=4, color=_LINE, label="banded inverse")
    bands = sorted({*bands, *others})
    axes.axhline(1.0, color=_LINE, lw=1.0, ls="--", label="DP-SGD", zorder=1)
    chosen, limit = comparison.recommended, comparison.request.max_memory
    star: dict[str, Any] = {
        "marker": "*",
        "ms": 17,
        "mfc": _CHOICE,
        "mec": "white",
        "ls": "none",
        "zorder": 4,
    }
    axes.plot([chosen.bands], [chosen.ratio], label=f"recommended ({chosen.ratio:.3f})", **star)
    right = bands[-1] * 1.2
    if limit is not None and limit + 1 < bands[-1]:
        # Between two counts of the grid: the last one that fits stays outside the shade.
        axes.axvspan((limit + 1) * 2**0.25, right, color=_OUT, zorder=0, label="too much memory")
    axes.set_xlim(2**-0.25, right)
    axes.set_xticks(bands, [str(count) for count in bands])
    axes.xaxis.set_minor_locator(NullLocator())
    ratios += [row.ratio for row in comparison.fractional] or [1.0]
    # Bad choices may be far off: what is near or below DP-SGD gets the room.
    axes.set_ylim(0.9 * min(*ratios, 1.0), min(1.1 * max(*ratios, 1.0), 2.0))
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("bands (kept, but by the inverse: bands - 1 vectors of the model's size)")
    axes.set_ylabel("accumulated noise / DP-SGD's")
    axes.set_title(title(comparison), fontsize=9, loc="left")
    axes.legend(frameon=False, fontsize=8, ncols=2)
    write_plot(figure, path)
