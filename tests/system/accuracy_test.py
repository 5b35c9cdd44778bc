"""Every line of the first table of docs/accuracy.md, computed again from the rows."""

from __future__ import annotations

import json
import re
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "accuracy.md").read_text()
ROWS = [json.loads(line) for line in (ROOT / "results" / "rows.jsonl").read_text().splitlines()]
LINE = re.compile(
    r"\| (\S+) \| `(\S+)` \| (\d+) \| ([\d.]+) \| ([\d.]+) \((.*?)\) \| ([\d.]+) \((.*?)\) \|"
)
RATES = {"scatter": 5, "scatter-mirror": 4}
LINES = [
    match.groups()
    for line in PAGE.partition("## Images")[2].partition("| published")[0].splitlines()
    if (match := LINE.fullmatch(line.partition(" #")[0].strip()))
]


def runs(data, recipe, epsilon, role, **facts):
    config = {"dataset": data.replace("-", "").lower(), "target_epsilon": float(epsilon)} | facts
    own = [row for row in ROWS if row["experiment"] == recipe]
    own = [row for row in own if config.items() <= row["config"].items()]
    return [row for row in own if row["role"] == role]


def test_the_page_has_every_line():
    rows = [row for row in ROWS if row["experiment"] in RATES and row["role"] == "final"]
    made = {(row["dataset"], row["experiment"], row["config"]["target_epsilon"]) for row in rows}
    shown = {(d.replace("-", "").lower(), recipe, float(e)) for d, recipe, e, *_ in LINES}
    assert shown == made
    assert len(LINES) >= 6


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-".join(line[:3]))
def test_a_line_is_the_mean_and_spread_of_its_rows(line):
    data, recipe, epsilon, rate, last, last_spread, averaged, averaged_spread = line
    finals = runs(data, recipe, epsilon, "final", lr=float(rate))
    assert {row["seed"] for row in finals} == set(range(5))
    assert len(finals) == 5
    for name, mean, spread in (
        ("final_accuracy", last, last_spread),
        ("averaged_accuracy", averaged, averaged_spread),
    ):
        values = [100 * row[name] for row in finals]
        assert f"{statistics.fmean(values):.2f}" == mean
        assert f"{min(values):.2f} to {max(values):.2f}" == spread
    assert all(row["epsilon"] <= float(epsilon) for row in finals)


@pytest.mark.parametrize("line", LINES, ids=lambda line: "-".join(line[:3]))
def test_the_rate_is_the_best_of_the_tuning_runs(line):
    data, recipe, epsilon, rate = line[:4]
    tuning = runs(data, recipe, epsilon, "tuning")
    assert len(tuning) == RATES[recipe]
    assert max(tuning, key=lambda row: row["final_accuracy"])["config"]["lr"] == float(rate)
    assert all(row["config"]["test_range"] is None for row in tuning)
