"""A reading says everything that a run of the plain loop needs, and nothing that it lacks."""

from __future__ import annotations

from typing import Any

import pytest

from vestige.errors import ConfigError
from vestige.lab.readings import Reading

FACTS: dict[str, Any] = {
    "dataset": "cifar10",
    "train_range": [0, 450],
    "test_range": [0, 10],
    "lot": 200,
    "epochs": 7,
    "lr": 0.5,
    "noise_multiplier": 0.7,
}


def test_its_config_names_every_setting_and_its_loop() -> None:
    config = Reading(**FACTS, beta=0.9, noise="stored").config()
    assert config["kind"] == "plain loop"
    assert config.keys() - {"kind"} == Reading.model_fields.keys()
    assert (config["beta"], config["noise"]) == (0.9, "stored")


def test_a_last_lot_that_is_not_full_counts() -> None:
    assert Reading(**FACTS).steps == 7 * 3


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"noise": "nowhere"}, "release, stored, step"),
        ({"beta": 0.0}, "beta"),
        ({"pixels": "blue"}, "half, unit, standard"),
        ({"unknown": 1}, "unknown"),
        ({"train_range": [5, 5]}, "first < end"),
    ],
)
def test_a_bad_one_is_refused_in_words(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        Reading(**FACTS | wrong)
