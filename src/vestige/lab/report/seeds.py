"""Curves over seeds: their mean, and a band of one sample standard deviation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vestige.audit.palette import Style
from vestige.lab.report.panels import Line
from vestige.lab.statistics import sample_std

MOST_POINTS = 130  # of a drawn line: more cannot be told apart, and would only be carried along
BAND = (
    "Lines are means over the seeds, bands one sample standard deviation. Of long runs evenly "
    "chosen epochs are drawn; the rows have all."
)

Numbers = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """One run's numbers `y` at `x`, at common positions `at` such as epochs."""

    at: Numbers
    x: Numbers
    y: Numbers


def mean_line(label: str, style: Style, runs: Sequence[Series]) -> Line | None:
    """The mean of the runs at every position that has a number; None where none has."""
    found: dict[float, list[tuple[float, float]]] = {}
    for run in runs:
        for at, place, value in zip(run.at, run.x, run.y, strict=True):
            if at is not None and place is not None and value is not None:
                found.setdefault(at, []).append((place, value))
    if not found:
        return None
    kept = thinned(sorted(found))
    x = [_mean([pair[0] for pair in found[at]]) for at in kept]
    means = [_mean([pair[1] for pair in found[at]]) for at in kept]
    if max(map(len, found.values())) == 1:
        return Line(label, style, x, means)
    spreads = [_std([pair[1] for pair in found[at]]) for at in kept]
    low = [mean - std for mean, std in zip(means, spreads, strict=True)]
    high = [mean + std for mean, std in zip(means, spreads, strict=True)]
    return Line(label, style, x, means, low, high)


def thinned(positions: Sequence[float]) -> list[float]:
    """Evenly chosen positions, the first and the last among them."""
    count = len(positions)
    if count <= MOST_POINTS:
        return list(positions)
    step = -(-(count - 1) // (MOST_POINTS - 1))
    # Counted from the end: the last epoch is what tables report.
    return list(dict.fromkeys([positions[0], *reversed(positions[::-step])]))


def curve(row: Mapping[str, Any], x: str, y: str) -> Series:
    """A curve of a row, by the names of its lists."""
    known = row["curve"]
    return Series(known["epoch"], known[x], known[y])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _std(values: Sequence[float]) -> float:
    return sample_std(values) if len(values) > 1 else 0.0
