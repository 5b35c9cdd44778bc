"""The numbers of a report, against numpy."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.stats import ttest_1samp

from tests.support.experiments import (
    REPORT_FAIR,
    REPORT_TOY,
    TOY,
    made_rows,
    quiet,
    report_toy,
    stored,
    written,
)
from vestige.lab.definition import Experiment
from vestige.lab.rows import Rows
from vestige.lab.runner import Request
from vestige.lab.summary import begun, ceilings, fitted, private_levels, rows_of, summarised


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_the_numbers_of_a_report_by_hand(tmp_path: Path, toy: Experiment) -> None:
    quiet(Request(experiments=(toy,), out=tmp_path / "out"))
    rows = stored(tmp_path / "out")
    numbers = summarised(toy, rows_of(toy, Rows(tmp_path / "out").refresh()))
    first, second = numbers["published"][0]["lines"]
    accuracies = {
        label: [row["final_accuracy"] for row in rows if row["label"] == label]
        for label in ("DP-SGD", "FO")
    }
    assert first["accuracy"]["mean"] == pytest.approx(np.mean(accuracies["DP-SGD"]))
    assert first["accuracy"]["std"] == pytest.approx(np.std(accuracies["DP-SGD"], ddof=1))
    assert first["relative_seconds"] == pytest.approx(1.0)
    difference = np.mean(accuracies["FO"]) - np.mean(accuracies["DP-SGD"])
    assert second["against_reference"]["difference"] == pytest.approx(difference)
    assert second["against_reference"]["comparisons"] == 1
    assert second["memory"]["depth"] > 0
    assert first["paper"]["accuracy"] == 0.5


def test_the_ceiling_is_the_best_rates_best_epoch_on_average(
    tmp_path: Path, toy: Experiment
) -> None:
    quiet(Request(experiments=(toy,), out=tmp_path / "out"))
    rows = Rows(tmp_path / "out").refresh()
    best = [
        np.mean([row["best_accuracy"] for row in rows.values() if row["label"] == arm.label])
        for arm in toy.arms
    ]
    assert ceilings(toy, rows) == {"digits": pytest.approx(max(best))}
    assert ceilings(toy, {}) == {}


def test_the_level_of_a_private_model_needs_all_of_its_runs(tmp_path: Path) -> None:
    experiment = report_toy(tmp_path, REPORT_TOY + REPORT_FAIR)
    made = made_rows(experiment)
    finals = [
        row
        for row in made
        if (row["role"], row["column"], row["label"]) == ("final", "fair", "DP-SGD")
    ]
    rows = {row["hash"]: row for row in made}
    last = [row["final_accuracy"] for row in finals if row["cell"]["epsilon"] == 8.0]
    assert len(last) == 2
    assert private_levels(experiment, rows) == {"mnist": pytest.approx(np.mean(last))}
    del rows[finals[-1]["hash"]]
    assert private_levels(experiment, rows) == {}


def test_a_column_without_arms_asks_for_no_more_seeds(tmp_path: Path, toy: Experiment) -> None:
    """Where nothing is asked for, all of it is there however many seeds there are."""
    fair_only = toy.model_copy(update={"arms": []})
    assert fitted(fair_only, {}).seeds == toy.seeds


def test_tuning_rows_that_are_only_shared_begin_no_experiment(tmp_path: Path) -> None:
    experiment = report_toy(tmp_path, REPORT_TOY + REPORT_FAIR)
    made = made_rows(experiment)

    def of(role: str, name: str) -> dict[str, Any]:
        return {r["hash"]: r | {"experiment": name} for r in made if r["role"] == role}

    assert not begun(experiment, {})
    assert not begun(experiment, of("tuning", "another"))
    assert begun(experiment, of("tuning", experiment.name))
    assert begun(experiment, of("final", "another"))


CONTROL = """
[[fair.arm]]
label = "the reference once more"
method = "dp-sgd"
follows = "DP-SGD"
"""


def fair_lines(folder: Path, content: str) -> list[dict[str, Any]]:
    experiment = report_toy(folder, content)
    numbers = summarised(experiment, made_rows(experiment))
    return [line for cell in numbers["fair"] for line in cell["lines"]]


def test_an_arm_that_is_the_reference_is_neither_tested_nor_counted(tmp_path: Path) -> None:
    """Else it would make the correction of the others stricter than it is."""
    lines = fair_lines(tmp_path, REPORT_TOY + REPORT_FAIR + CONTROL)
    same = [line for line in lines if line["label"] == "the reference once more"]
    assert [line["same_runs"] for line in same] == ["DP-SGD"] * 2
    assert not any("against_reference" in line for line in same)
    tested = [line["against_reference"] for line in lines if "against_reference" in line]
    assert [test["comparisons"] for test in tested] == [2, 2]


def test_with_a_margin_equality_is_tested_too(tmp_path: Path) -> None:
    margin = REPORT_FAIR.replace("seeds = 2", "seeds = 4\nmargin = 0.2\nfirst_seed = 5")
    experiment = report_toy(tmp_path, REPORT_TOY + margin)
    rows = made_rows(experiment)
    finals = [row for row in rows if row["column"] == "fair" and row["role"] == "final"]
    assert {row["seed"] for row in finals} == {5, 6, 7, 8}
    (line,) = [
        line
        for line in summarised(experiment, rows)["fair"][0]["lines"]
        if line["label"] == "Followed"
    ]
    ours, base = (
        {
            row["seed"]: row["final_accuracy"]
            for row in finals
            if row["label"] == label and row["cell"]["epsilon"] == 3.0
        }
        for label in ("Followed", "DP-SGD")
    )
    apart = [ours[seed] - base[seed] for seed in range(5, 9)]
    interval = ttest_1samp(apart, 0).confidence_interval(0.90)
    test = line["equivalence"]
    assert (test["low"], test["high"]) == pytest.approx((interval.low, interval.high))
    assert test["margin"] == 0.2
