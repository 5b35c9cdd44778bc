"""Curves over seeds and stages, by hand."""

from __future__ import annotations

import math

import pytest

from vestige.lab.plots import look
from vestige.lab.report.curves import MOST_POINTS, mean_line, stages_of, thinned


def test_lines_over_seeds_by_hand() -> None:
    style = look(0)
    runs = [([1, 2], [1, 2], [0.1, 0.2]), ([1, 2, 3], [1, 2, 3], [0.3, None, 0.5])]
    line = mean_line("a", style, runs)
    assert line is not None
    assert line.x == [1, 2, 3] and line.y == pytest.approx([0.2, 0.2, 0.5])
    std = math.sqrt(2) * 0.1
    assert line.low == pytest.approx([0.2 - std, 0.2, 0.5])
    assert line.high == pytest.approx([0.2 + std, 0.2, 0.5])
    alone = mean_line("a", style, runs[:1])
    assert alone is not None and alone.low is None
    assert mean_line("a", style, [([1], [1], [None])]) is None


@pytest.mark.parametrize("count", [1, 2, MOST_POINTS, MOST_POINTS + 1, 250, 251, 1000])
def test_thinned_lines_keep_their_ends(count: int) -> None:
    positions = [float(i) for i in range(1, count + 1)]
    kept = thinned(positions)
    assert kept[0] == 1 and kept[-1] == count and kept == sorted(set(kept))
    assert len(kept) <= MOST_POINTS + 1


def test_stages_of_networks() -> None:
    assert stages_of(["hidden1", "out"]) == ["hidden1", "out"]
    many = ["conv", "norm", *(f"blocks.{i}.conv1" for i in range(8)), "out"]
    assert stages_of(many) == [
        *("stem", "stem"),
        *(f"stage {i // 2 + 1}" for i in range(8)),
        "head",
    ]
    assert (
        stages_of([f"a.{i}" for i in range(5)] + [f"b.{i}" for i in range(5)])
        == ["a"] * 5 + ["b"] * 5
    )
