"""A row that cannot be reported is named."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import made_rows, report_toy
from vestige.errors import ConfigError
from vestige.lab import catalogue, report


def without(name: str) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.pop(name)


def changed(name: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update({name: value})


def within(name: str, inner: str, value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda row: row.update({name: row[name] | {inner: value}})


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (without("curve"), "curve is missing"),
        (without("final_accuracy"), "final_accuracy is missing"),
        (changed("final_accuracy", "high"), "final_accuracy is 'high' (it must be a valid number)"),
        (changed("final_accuracy", math.nan), "final_accuracy is nan"),
        (changed("seconds", True), "seconds is True"),
        (changed("seed", "0"), "seed is '0' (it must be a valid integer)"),
        (changed("epsilon", "small"), "epsilon is 'small' (it must be a valid number)"),
        (without("epsilon_marginal"), "epsilon_marginal is missing"),
        (changed("method", None), "method is None (it must be a valid string)"),
        (changed("hardware", []), "hardware is [] (it must be a valid dictionary)"),
        (within("curve", "accuracy", [0.1]), "do not belong together"),
        (within("curve", "epoch", "1, 2"), "curve.epoch is '1, 2' (it must be a valid list)"),
        (within("curve", "epoch", [None] * 6), "curve.epoch.0 is None"),
        (within("diagnostics", "rho", [[1.0]]), "diagnostics: rho has not one number"),
        (within("diagnostics", "groups", None), "diagnostics.groups is None"),
        (within("diagnostics", "mean", None), "diagnostics.mean is None"),
    ],
)
def test_a_broken_row_is_named(
    damage: Callable[[dict[str, Any]], None], words: str, tmp_path: Path
) -> None:
    experiment = report_toy(tmp_path)
    rows = made_rows(experiment)
    broken = next(i for i, row in enumerate(rows) if row["label"] == "SMA")
    rows[broken] = dict(rows[broken])
    damage(rows[broken])
    with pytest.raises(ConfigError, match=r"cannot be reported.*take its line out") as caught:
        report.write(experiment, rows, tmp_path / "toy")
    assert words in str(caught.value) and rows[broken]["hash"] in str(caught.value)
    assert not (tmp_path / "toy").exists()


def test_a_broken_point_of_a_study_is_named(tmp_path: Path) -> None:
    experiment = catalogue.find("geodp-fig4").quickened()
    rows = made_rows(experiment)
    rows[0] = rows[0] | {"errors": {"geodp_cosine": None}}
    with pytest.raises(ConfigError, match=r"errors\.geodp_cosine is None"):
        report.write(experiment, rows, tmp_path)
