"""The numbers of a report, against numpy."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.support.experiments import TOY, quiet, stored, written
from vestige.lab.definition import Experiment
from vestige.lab.rows import Rows
from vestige.lab.runner import Request
from vestige.lab.summary import fitted, rows_of, summarised


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


def test_a_column_without_arms_asks_for_no_more_seeds(tmp_path: Path, toy: Experiment) -> None:
    """Where nothing is asked for, all of it is there however many seeds there are."""
    fair_only = toy.model_copy(update={"arms": []})
    assert fitted(fair_only, {}).seeds == toy.seeds
