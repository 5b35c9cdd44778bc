"""One training run: the guesses' bound, and the attack on the final model."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.support.audits import (
    often,
)
from vestige.audit.attack import audit
from vestige.audit.attack.one_run import guessing_bound
from vestige.methods import (
    METHODS,
)


def test_the_one_run_bound_fails_no_more_often_than_it_says():
    rng, found = np.random.default_rng(4), []
    true = 1.0
    for _ in range(100):
        member = rng.random(800) < 0.5
        said = np.where(rng.random(800) < 1 / (1 + math.exp(-true)), member, ~member)
        scores = said + 0.1 * rng.random(800)
        found.append(guessing_bound(scores, member, 1e-5, 0.95)[0])
    assert not often(sum(value > true for value in found), 100)
    assert np.median(found) > 0.6 * true


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma", "dp-sam", "dp-ftrl", "geodp"])
def test_the_one_run_audit_trains_the_real_engine_and_stays_below_the_claim(method):
    result = audit(method, mode="one-run", noise_multiplier=1.0, steps=12, trials=300, seed=5)
    assert result.mode == "one-run" and result.epsilon_lower_family is None
    if METHODS[method].private:
        assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    else:
        assert result.epsilon_claimed is None and result.epsilon_published > 0


def test_the_one_run_audit_sees_a_run_with_little_noise():
    result = audit("dp-sgd", mode="one-run", noise_multiplier=0.2, trials=1000, seed=6)
    assert 1 < result.epsilon_lower <= result.epsilon_claimed
    assert result.trials == 1000
