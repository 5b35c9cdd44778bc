"""The settings of a pre-training: refused at once where they are bad, and public."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vestige import ConfigError
from vestige.train.recipes.pretraining import Pretraining


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"steps": 0}, "steps"),
        ({"batch": 1}, "batch"),  # nothing to tell it from
        ({"side": 4}, "side"),
        ({"minutes": 0.0}, "minutes"),
        ({"seed": -1}, "seed"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
    ],
)
def test_bad_settings_are_refused(given, told):
    with pytest.raises(ConfigError, match=told):
        Pretraining(**given)


def test_weights_are_a_function_of_four_numbers():
    one = Pretraining(steps=3, seed=2)
    assert one.public == {"steps": 3, "batch": 512, "side": 32, "seed": 2}
    assert one.changed(minutes=3.0, device="cpu", file="other.pt").public == one.public


def test_a_wrong_setting_is_answered_without_torch():
    program = "import sys, vestige.train.recipes.pretraining; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
