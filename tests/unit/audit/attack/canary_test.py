"""The audit's teeth and its honesty.

Statistical tests have fixed seeds; where they count how often a bound fails over many simulations,
the limit is the binomial quantile that an honest bound exceeds with probability 1e-6.
"""

from __future__ import annotations

import numpy as np
import pytest

from tests.support.audits import (
    PRIVATE,
    VARIANTS,
    often,
)
from vestige.audit.attack import audit
from vestige.methods import (
    Kalman,
)
from vestige.release.door import Door


@pytest.mark.parametrize("target", [2.0, 4.0])
@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma"])
def test_the_family_bound_reaches_60_percent_of_the_claim(method, target):
    result = audit(method, epsilon=target, trials=4000, seed=21)
    assert result.epsilon_claimed == pytest.approx(target, rel=1e-3)
    assert 0.6 * target <= result.epsilon_lower_family <= result.epsilon_claimed
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    assert not result.violated
    assert result.trials == 4000 and result.family_trials == 4000 * result.steps
    assert result.seconds < 60


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("seed", [1, 2, 3])
@pytest.mark.parametrize(("target", "trials"), [(1.0, 20_000), (2.0, 4000), (4.0, 4000)])
@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma"])
def test_the_audit_has_teeth_at_every_claim_and_seed(method, target, trials, seed):
    result = audit(method, epsilon=target, trials=trials, seed=seed)
    assert 0.6 * target <= result.epsilon_lower_family <= result.epsilon_claimed
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed


@pytest.mark.parametrize("name", PRIVATE)
def test_no_bound_exceeds_the_claim_of_any_method(name):
    result = audit(name, noise_multiplier=1.2, steps=4, trials=300, seed=31)
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    assert 0 <= result.epsilon_lower_family <= result.epsilon_claimed
    assert result.epsilon_published is None and not result.violated


@pytest.mark.slow
@pytest.mark.audit
@pytest.mark.parametrize("name", [*PRIVATE, *VARIANTS])
def test_no_bound_exceeds_the_claim_with_many_trials(name):
    """One method in a few hundred audits may fail by chance; these seeds do not."""
    result = audit(VARIANTS.get(name, name), epsilon=2.0, trials=4000, seed=41)
    assert 0 <= result.epsilon_lower <= result.epsilon_claimed
    assert 0 < result.epsilon_lower_family <= result.epsilon_claimed


@pytest.mark.slow
@pytest.mark.audit
def test_both_bounds_of_the_real_engine_fail_no_more_often_than_they_say():
    found = [audit("sma", noise_multiplier=1.3, steps=8, trials=600, seed=s) for s in range(150)]
    assert not often(sum(r.epsilon_lower > r.epsilon_claimed for r in found), 150)
    assert not often(sum(r.epsilon_lower_family > r.epsilon_claimed for r in found), 150)


@pytest.mark.parametrize("method", ["dp-sgd", "sma", "dp-sam"])
def test_halved_noise_is_caught(method, monkeypatch):
    honest = Door._noise

    def halved(door, *arguments):
        for block, noise, std in honest(door, *arguments):
            yield block, noise, std / 2

    monkeypatch.setattr(Door, "_noise", halved)
    result = audit(method, epsilon=2.0, trials=4000, seed=51)
    assert result.epsilon_lower_family > result.epsilon_claimed
    assert result.violated
    assert result.noise_multiplier_upper < result.noise_multiplier_attacked


def test_an_audit_repeats_itself_with_a_seed_and_only_then():
    def one(seed):
        return audit("dp-sgd", noise_multiplier=1.5, steps=2, trials=200, seed=seed)

    first, again, fresh, other = one(5), one(5), one(None), one(None)
    assert np.array_equal(first.evidence.whole.scores, again.evidence.whole.scores)
    assert not np.array_equal(fresh.evidence.whole.scores, other.evidence.whole.scores)
    assert first.seeded and not fresh.seeded


def test_an_instance_with_settings_of_its_own_can_be_audited():
    result = audit(Kalman(beta=0.5), noise_multiplier=1.0, steps=4, trials=300, seed=1)
    assert result.noise_multiplier_attacked == pytest.approx(2.0)
    assert result.method == "kalman"
