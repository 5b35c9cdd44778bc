"""One run's settings, and the hash that names it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import TOY, written
from vestige.errors import ConfigError
from vestige.lab.definition import Experiment
from vestige.lab.grid import tasks_of
from vestige.lab.setting import RunSetting, config_hash


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_the_hash_is_of_what_changes_the_numbers(toy: Experiment) -> None:
    task = next(iter(tasks_of(toy, {})))
    assert config_hash(dict(reversed(task.config.items()))) == task.hash
    assert task.run is not None
    renamed = toy.model_copy(update={"name": "other", "title": "other", "device": "cuda"})
    assert next(iter(tasks_of(renamed, {}))).hash == task.hash
    for change in ({"seed": 1}, {"lr": 0.4}, {"epochs": 3}, {"method": "fo"}, {"clip": 0.5}):
        assert config_hash(task.run.model_copy(update=change).config()) != task.hash
    values = task.run.model_dump() | {"method": "fo"}
    whole = RunSetting(**(values | {"settings": {"beta": 1, "window": 3}, "clip": 1}))
    spelled = RunSetting(**(values | {"settings": {"beta": 1.0, "window": 3}, "clip": 1.0}))
    assert config_hash(whole.config()) == config_hash(spelled.config())


def test_run_settings_refuse_what_contradicts_itself() -> None:
    good: dict[str, Any] = {
        "dataset": "digits", "model": "linear", "method": "dp-sgd", "lr": 0.1, "lot": 10,
        "epochs": 1, "train_range": [0, 100], "test_range": [0, 10], "noise_multiplier": 1.0,
    }  # fmt: skip
    RunSetting(**good)
    for change, expected in (
        ({"epsilon": 1.0}, "exactly one of noise_multiplier"),
        ({"validation_range": [100, 200]}, "exactly one of test_range"),
        ({"momentum": 1.0}, "momentum"),
        ({"dataset": "file.npz"}, "unknown"),
    ):
        with pytest.raises(ConfigError, match=expected):
            RunSetting(**(good | change))
