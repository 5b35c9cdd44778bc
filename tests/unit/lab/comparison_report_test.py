"""What a comparison says about itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.pages import check_page
from vestige.lab import comparison_report


def report(**changes: Any) -> dict[str, Any]:
    accuracy = {"mean": 0.5, "low": 0.4, "high": 0.6, "count": 2, "std": 0.1}
    method = {"method": "<b>m</b>", "lr": 0.5, "noise_multiplier": 1.25, "epsilon": 1.001}
    run = {"method": "m", "role": "final", "seed": 0, "folder": ""}
    return {
        "dataset": "/home/me/secret place/data.npz",
        "model": "linear",
        "delta": 1e-5,
        "reference": "dp-sgd",
        "validation_records": 0,
        "methods": [method | {"accuracy": accuracy, "against_reference": None}],
        "runs": [run],
        "study_runs": 1,
        "study_epsilon": 1.001,
        "ledger_epsilon": None,
        "not_private": [],
        "interrupted": False,
    } | changes


def test_epsilons_are_rounded_up_and_names_are_text() -> None:
    (line,) = comparison_report.table(report()).lines
    assert line[3] == "1.01"
    assert "(epsilon 1.01, delta 1e-05)" in comparison_report.words(report())[0]
    page = check_page(comparison_report.page(report()))
    assert "<b>m</b>" in page.text  # as text


def test_where_the_models_are_is_said_where_they_are_kept() -> None:
    kept = report(runs=[{"folder": "runs/dp-sgd-final-seed-0"}])
    said = " ".join(comparison_report.words(kept))
    assert "vestige.load('OUT/runs/dp-sgd-final-seed-0')" in said
    named = " ".join(comparison_report.words(kept, "my study"))
    assert "vestige.load('my study/runs/dp-sgd-final-seed-0')" in named
    assert "vestige.load" not in " ".join(comparison_report.words(report()))


def test_an_interval_of_accuracies_stays_within_0_and_1() -> None:
    made = report()
    made["methods"][0]["accuracy"] |= {"mean": 0.97, "low": -0.02, "high": 1.04}
    (line,) = comparison_report.table(made).lines
    assert line[5] == "0.000 to 1.000"


@pytest.mark.usefixtures("empty_folder")
def test_the_files_do_not_say_where_the_data_lay() -> None:
    written = comparison_report.write(report(), Path())
    assert [path.name for path in written] == ["comparison.json", "report.html"]
    assert json.loads(written[0].read_text())["dataset"] == "data.npz"
    assert not any("secret place" in path.read_text() for path in written)
