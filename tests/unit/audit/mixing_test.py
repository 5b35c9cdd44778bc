"""The known covariance of correlated noise."""

from __future__ import annotations

import pytest

from vestige.audit.mixing import Mixing
from vestige.audit.verify.runs import observe
from vestige.methods import (
    DPFTRL,
    FractionalNoise,
)
from vestige.privacy.factorisation import tree_sensitivity


@pytest.mark.parametrize(
    "method",
    [FractionalNoise(order=0.5, bands=4), DPFTRL(), DPFTRL(honaker=False, restart=1)],
    ids=["banded", "honaker", "plain"],
)
def test_the_mixing_knows_the_marginals_and_reveals_no_more_than_is_charged(method):
    seen = observe(method, steps=24, seed=1)
    mixing = Mixing(method, seen.plan, 24)
    for row, look in enumerate(seen.whole.looks):
        told = look.stds[0] / (seen.setting.noise_multiplier * seen.setting.clip)
        assert mixing.marginals[row] == pytest.approx(told, rel=1e-9)
    if isinstance(method, FractionalNoise):
        # One lot of a record, the band's length before the end: exactly one release at sigma.
        assert mixing.revealed(24, [7]) == pytest.approx(1.0, rel=1e-9)
        assert mixing.revealed(24, [3, 4]) > 2.0  # neighbouring lots would cost more than two
    else:
        length = 24 if method.restart is None else seen.plan.lots_per_epoch
        pattern = list(range(2, length, seen.plan.lots_per_epoch))
        allowed = tree_sensitivity(length, seen.plan.lots_per_epoch)
        assert 1.0 < mixing.revealed(24, pattern) <= allowed * (1 + 1e-9)
