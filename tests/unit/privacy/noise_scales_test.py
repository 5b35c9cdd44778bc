"""The joint multiplier of groups with noise of their own."""

from __future__ import annotations

import math

import pytest

from vestige.errors import ConfigError
from vestige.privacy.noise_scales import joint_multiplier


def test_joint_multiplier() -> None:
    assert joint_multiplier([1.3]) == 1.3
    assert joint_multiplier([2.2] * 4) == pytest.approx(1.1)
    assert joint_multiplier([3.0, 4.0]) == pytest.approx(2.4)
    assert joint_multiplier([3.0, math.inf]) == 3.0
    assert joint_multiplier([math.inf]) == math.inf
    assert joint_multiplier([3.0, 0.0]) == 0.0
    assert joint_multiplier([1e-200, 1e200]) == pytest.approx(1e-200)


@pytest.mark.parametrize("sigmas", [[], [-1.0], [1.0, math.nan]])
def test_joint_multiplier_refuses(sigmas: list[float]) -> None:
    with pytest.raises(ConfigError, match="noise_multiplier"):
        joint_multiplier(sigmas)
