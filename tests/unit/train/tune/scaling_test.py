"""The scaling rule that costs nothing, and claims nothing."""

from __future__ import annotations

import pytest

from vestige.errors import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.tune import at_lot


def test_noise_per_lot_steps_and_rate_stay() -> None:
    small = TrainConfig(lot=32, noise_multiplier=0.5, steps=400, lr=2.0)
    large = at_lot(small, 1024)
    assert (large.lot, large.noise_multiplier, large.steps, large.lr) == (1024, 16.0, 400, 2.0)
    assert at_lot(large, 32) == small


@pytest.mark.parametrize("missing", ["steps", "noise_multiplier"])
def test_the_rule_needs_what_it_keeps(missing: str) -> None:
    given = {"noise_multiplier": 1.0, "steps": 10}
    given.pop(missing)
    with pytest.raises(ConfigError, match="give both"):
        at_lot(TrainConfig(lot=8, **given), 16)
