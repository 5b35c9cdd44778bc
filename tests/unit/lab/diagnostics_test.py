"""What a row keeps of the memory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import TOY, written
from vestige.lab.definition import Experiment
from vestige.lab.grid import tasks_of
from vestige.lab.training_row import make_row
from vestige.train import training
from vestige.train.data import load_ranges


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_memory_diagnostics_are_means_over_groups_and_steps(toy: Experiment) -> None:
    """Against the numbers of every step: the mean over groups and steps t >= window - 1."""
    task = next(t for t in tasks_of(toy, {}) if t.label == "FO")
    assert task.run is not None
    settings = {"beta": 0.8, "window": 4, "alpha": 0.9, "interval": [2.0, 2.5]}
    changes = {"model": "mlp", "method": "sma", "settings": settings, "epochs": 3}
    run_ = task.run.model_copy(update=changes)
    row = make_row(replace(task, run=run_, config=run_.config()))

    lines: list[Any] = []
    session = training.prepare(run_.train_config(), dataset=load_ranges("digits", (0, 300), (0, 9)))
    session.run(lambda p: lines.append(p.metrics) if p.metrics else None)
    for name in ("depth", "memory_ratio", "rho", "tempering"):
        values = [
            value
            for line in lines
            for step, groups in zip(
                line["diagnostics"]["step"], line["diagnostics"][name], strict=True
            )
            if step >= 3
            for value in groups
        ]
        assert len(values) == 3 * (18 - 3)
        mean = row["diagnostics"]["mean"][name]
        assert mean == pytest.approx(sum(values) / len(values), rel=1e-4)
    assert row["diagnostics"]["epoch"] == [1, 2, 3]
    assert row["diagnostics"]["steps"] == [3, 6, 6]
    assert len(row["diagnostics"]["depth"][0]) == len(row["diagnostics"]["groups"]) == 3
