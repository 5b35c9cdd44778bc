"""Curves over seeds and stages: means, with a band of one sample standard deviation.

A stage is a clipping group, or, where there are many groups, what their names begin with. The
blocks of a ResNet-18 come in four stages of two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from vestige.lab.plots import Line, Panel, Style, from_zero, line_panel, look, shade
from vestige.lab.statistics import sample_std

MOST_POINTS = 130  # of a drawn line: more cannot be told apart, and would only be carried along
BAND = (
    "Lines are means over the seeds, bands one sample standard deviation. Of long runs evenly "
    "chosen epochs are drawn; the rows have all."
)
MEASURES = {
    "rho": "exponent rho",
    "tempering": "tempering lambda",
    "depth": "memory depth, steps",
    "memory_ratio": "memory ratio",
}
_BLOCK = re.compile(r"blocks\.(\d+)\.")
_MOST_GROUPS = 8  # more lines than that are told apart by nobody

Numbers = Sequence[float | None]
Series = tuple[Numbers, Numbers, Numbers]  # common positions such as epochs, and x and y there


def mean_line(label: str, style: Style, runs: Sequence[Series]) -> Line | None:
    """The mean of the runs at every position that has a number; None where none has."""
    points: dict[float, list[tuple[float, float]]] = {}
    for positions, x, y in runs:
        for at, place, value in zip(positions, x, y, strict=True):
            if at is not None and place is not None and value is not None:
                points.setdefault(at, []).append((place, value))
    if not points:
        return None
    kept = thinned(sorted(points))
    x_means = [_mean([place for place, _ in points[at]]) for at in kept]
    values = [[value for _, value in points[at]] for at in kept]
    means = [_mean(some) for some in values]
    if max(map(len, points.values())) == 1:
        return Line(label, style, x_means, means)
    spreads = [sample_std(some) if len(some) > 1 else 0.0 for some in values]
    low = [mean - std for mean, std in zip(means, spreads, strict=True)]
    high = [mean + std for mean, std in zip(means, spreads, strict=True)]
    return Line(label, style, x_means, means, low, high)


def thinned(positions: Sequence[float]) -> list[float]:
    """Evenly chosen positions, the first and the last among them."""
    count = len(positions)
    if count <= MOST_POINTS:
        return list(positions)
    step = -(-(count - 1) // (MOST_POINTS - 1))
    # Counted from the end: the last epoch is what tables report.
    return list(dict.fromkeys([positions[0], *reversed(positions[::-step])]))


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def stages_of(groups: Sequence[str]) -> list[str]:
    """The stage of each group."""
    if len(groups) <= _MOST_GROUPS:
        return list(groups)
    if any(_BLOCK.match(group) for group in groups):
        return [_residual_stage(group) for group in groups]
    return [group.partition(".")[0] for group in groups]


def _residual_stage(group: str) -> str:
    block = _BLOCK.match(group)
    if block:
        return f"stage {int(block[1]) // 2 + 1}"
    return "head" if group.startswith(("out", "fc", "head")) else "stem"


def stage_panels(rows: Sequence[Mapping[str, Any]], of: str = "") -> list[Panel]:
    """One panel for each measure that the rows of one method have recorded; `of` names them."""
    facts = [row["diagnostics"] for row in rows if row["diagnostics"]]
    if not facts:
        return []
    stages = list(dict.fromkeys(stages_of(facts[0]["groups"])))
    interval = rows[0]["settings"].get("interval")
    panels = []
    for name, label in MEASURES.items():
        recorded = [one for one in facts if name in one]
        lines = [
            line
            for number, stage in enumerate(stages)
            if (line := mean_line(stage, look(number), [_series(f, name, stage) for f in recorded]))
        ]

        def finish(axes: Any, name: str = name) -> None:
            if name != "rho":
                from_zero(axes)
            elif interval:
                shade(axes, interval)

        if lines:
            title = f"{label}: {of}" if of else label
            panels.append(line_panel(title, ("epoch", label), lines, finish=finish))
    return panels


def _series(facts: Mapping[str, Any], name: str, stage: str) -> Series:
    """A measure of one run over its epochs: the mean over the matrix groups of a stage."""
    members = [i for i, other in enumerate(stages_of(facts["groups"])) if other == stage]
    values: list[float | None] = []
    exponents = facts.get("rho") or [[]] * len(facts[name])
    for numbers, rho in zip(facts[name], exponents, strict=True):
        # Groups without an exponent have no matrix, wherever exponents are estimated at all.
        unknown = not any(value is not None for value in rho)
        chosen = [numbers[i] for i in members if unknown or rho[i] is not None]
        known = [value for value in chosen if value is not None]
        values.append(sum(known) / len(known) if known else None)
    return facts["epoch"], facts["epoch"], values
