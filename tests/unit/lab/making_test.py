"""Long rows: stopped in time or killed, they go on at their last epoch, with the same numbers."""

from __future__ import annotations

import math
import time
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import TOY, stored, written
from vestige.lab.definition import Experiment
from vestige.lab.grid import Task, tasks_of
from vestige.lab.making import UNFINISHED, Made, make
from vestige.lab.runner import Request, reproduce
from vestige.lab.training_row import make_row

SAME = set("seconds versions hardware".split())


@pytest.fixture
def long(tmp_path: Path) -> Experiment:
    text = TOY.replace('title = "A toy"', 'title = "A toy"\nlong = true')
    text = text.replace("epochs = 2", "epochs = 4\naveraging = 'ema:0.9'")
    return written(tmp_path, text.replace("seeds = 2", "seeds = 1"))


def task_of(experiment: Experiment, label: str) -> Task:
    return next(task for task in tasks_of(experiment, {}) if task.label == label)


def without(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in SAME}


def made(task: Task, root: Path, watch: Any = None, deadline: float = math.inf) -> Made:
    return make(task, str(root), None, 1, watch, deadline)


@pytest.mark.parametrize("label", ["DP-SGD", "FO"])
def test_a_row_that_was_stopped_twice_is_that_of_one_command(tmp_path, long, label):
    task, root = task_of(long, label), tmp_path / "out"
    whole = make_row(task)
    assert made(task, root, deadline=time.time() - 1).late  # after one epoch
    home = root / UNFINISHED / task.hash
    assert len((home / "metrics.jsonl").read_text().splitlines()) == 1

    def killed(epoch: int, epochs: int) -> None:
        if epoch == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made(task, root, killed)
    assert made(task, root) == Made()
    (row,) = stored(root)
    assert without(row) | {"curve": 0} == without(whole) | {"curve": 0}
    assert {**row["curve"], "epsilon": 0} == {**whole["curve"], "epsilon": 0}
    assert row["curve"]["epsilon"] == pytest.approx(whole["curve"]["epsilon"], abs=0.01)
    assert row["averaged_accuracy"] == whole["averaged_accuracy"]
    assert row["seconds"] > 0
    assert list((root / UNFINISHED).iterdir()) == []


def test_a_deadline_lets_a_long_row_begin_and_the_same_command_ends_it(tmp_path, long):
    request = {"experiments": (long,), "out": tmp_path / "out"}
    first = reproduce(Request(**request, minutes=1e-4))
    assert first.deadline and first.finished == 0 and not first.failures
    second = reproduce(Request(**request))
    assert (second.finished, second.total) == (2, 2)


def test_other_rows_have_no_folder(tmp_path):
    task = task_of(written(tmp_path, TOY), "DP-SGD")
    assert made(task, tmp_path / "out", deadline=0.0) == Made()
    assert not (tmp_path / "out" / UNFINISHED).exists()
