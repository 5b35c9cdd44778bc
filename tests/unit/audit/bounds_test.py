"""The bounds against closed forms, and how often they fail.

Statistical tests have fixed seeds; where they count how often a bound fails over many simulations,
the limit is the binomial quantile that an honest bound exceeds with probability 1e-6.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom, norm

from tests.support.audits import (
    often,
)
from vestige import ConfigError
from vestige.audit.bounds import (
    Trials,
    clopper_pearson,
    family_events,
    membership_epsilon,
    one_run_epsilon,
    p_value,
    shift_lower,
    shift_of,
)
from vestige.privacy.accounting import Charge, epsilon
from vestige.privacy.ledger import Event


@pytest.mark.parametrize("n", [1, 10, 1000])
def test_clopper_pearson_without_errors_has_a_closed_form(n):
    lower, upper = clopper_pearson(0, n, 0.025)
    assert lower == 0 and float(upper) == pytest.approx(1 - 0.025 ** (1 / n))
    lower, upper = clopper_pearson(n, n, 0.025)
    assert float(lower) == pytest.approx(0.025 ** (1 / n)) and upper == 1


def test_the_ends_are_where_the_binomial_tails_are_alpha():
    for k, n in ((1, 7), (5, 40), (321, 2000)):
        lower, upper = clopper_pearson(k, n, 0.01)
        assert binom.cdf(k, n, upper) == pytest.approx(0.01)
        assert binom.sf(k - 1, n, lower) == pytest.approx(0.01)


def test_the_shift_of_a_pair_of_error_rates_is_that_of_the_gaussian():
    for mu in (0.1, 0.5, 2.0):
        for cut in (-1.0, 0.0, 1.5):
            assert shift_of(norm.sf(cut), norm.cdf(cut - mu)) == pytest.approx(mu)


def test_two_kinds_that_never_mix_give_the_bound_of_no_errors():
    labels = np.arange(400) % 2 == 0
    trials = Trials.of(np.where(labels, 1.0, 0.0), labels, np.arange(400), 400)
    found, cut = membership_epsilon(trials, 1e-5, 0.95)
    hit, alarm = 0.025 ** (1 / 100), 1 - 0.025 ** (1 / 100)
    assert found == pytest.approx(math.log((hit - 1e-5) / alarm))
    assert (cut.hits, cut.false_alarms, cut.hit_trials, cut.alarm_trials) == (100, 0, 100, 100)


def test_the_familys_events_are_the_plan_at_the_noise_that_is_allowed():
    charges = {Charge(0.1, 0.5): 3, Charge(0.1, 0.25): 1, Charge(1.0, 0.0, 0.02): 2}
    assert family_events(charges, 2.0, 4.0, 4.0) == (Event(0.1, 4.0, 3), Event(0.1, 8.0, 1))
    twice = family_events(charges, 2.0, 4.0, 8.0)
    assert twice == (Event(0.1, 8.0, 3), Event(0.1, 16.0, 1))
    assert epsilon(twice, 1e-5) < epsilon(family_events(charges, 2.0, 4.0, 4.0), 1e-5)
    assert family_events(charges, 2.0, 4.0, math.inf) == ()


@pytest.mark.parametrize("mu", [0.4, 1.0])
def test_the_shift_bound_fails_no_more_often_than_it_says_and_is_close(mu):
    rng, found = np.random.default_rng(1), []
    canary = np.arange(8000)
    for _ in range(300):
        inside = rng.random(8000) < 0.3
        scores = rng.standard_normal(8000) + mu * inside
        found.append(shift_lower(Trials.of(scores, inside, canary, 8000), 0.95))
    assert not often(sum(value > mu for value in found), 300)
    assert np.median(found) > (0.6 if mu < 1 else 0.8) * mu


def test_the_shift_bound_is_honest_where_the_trials_differ():
    """Half of the canaries are at a worse place: the bound is on the best place's shift."""
    rng, failures = np.random.default_rng(2), 0
    canary = np.arange(1000)
    for _ in range(300):
        inside, good = rng.random(1000) < 0.5, rng.random(1000) < 0.5
        scores = rng.standard_normal(1000) + np.where(good, 1.0, 0.3) * inside
        failures += shift_lower(Trials.of(scores, inside, canary, 1000), 0.95) > 1.0
    assert not often(failures, 300)


@pytest.mark.parametrize("true", [0.5, 2.0])
def test_the_membership_bound_fails_no_more_often_than_it_says(true):
    """Randomised response is (epsilon, 0)-DP exactly, so the bound has nothing to give away."""
    rng, found = np.random.default_rng(3), []
    canary = np.arange(2000)
    honest = 1 / (1 + math.exp(-true))
    for _ in range(400):
        member = rng.random(2000) < 0.5
        said = np.where(rng.random(2000) < honest, member, ~member)
        trials = Trials.of(said + 0.0, member, canary, 2000)
        found.append(membership_epsilon(trials, 1e-5, 0.95)[0])
    assert not often(sum(value > true for value in found), 400)
    assert np.median(found) > 0.6 * true


def test_the_one_run_bound_gives_the_papers_printed_values():
    """Appendix D and section 7 of arXiv 2305.08846."""
    assert one_run_epsilon(1000, 100, 75, 1e-4, 0.95) == pytest.approx(0.673, abs=1e-3)
    assert one_run_epsilon(100_000, 1510, 1439, 1e-5, 0.95) == pytest.approx(2.675, abs=1e-3)


def test_without_delta_the_p_value_is_a_binomial_tail():
    for eps in (0.0, 0.7, 3.0):
        chance = math.exp(eps) / (1 + math.exp(eps))
        assert p_value(1, 1, 1, eps, 0.0) == pytest.approx(chance)
        assert p_value(2, 2, 1, eps, 0.0) == pytest.approx(1 - (1 - chance) ** 2)
        assert p_value(50, 20, 13, eps, 0.0) == pytest.approx(binom.sf(12, 20, chance))


def test_the_p_value_covers_a_mechanism_that_tells_everything_with_probability_delta():
    """It is (epsilon, delta)-DP: randomised response otherwise."""
    for m, eps, delta in ((1, 0.5, 0.05), (5, 1.0, 0.01), (40, 0.3, 0.001)):
        chance = 1 / (1 + math.exp(-eps))
        for v in range(m + 1):
            exact = delta + (1 - delta) * binom.sf(v - 1, m, chance)
            assert exact <= p_value(m, m, v, eps, delta) + 1e-12


def test_more_correct_guesses_refute_more_and_delta_refutes_less():
    found = [one_run_epsilon(500, 100, v, 1e-5, 0.95) for v in range(40, 101, 5)]
    assert found == sorted(found) and found[0] == 0 < found[-1]
    assert one_run_epsilon(500, 100, 90, 1e-3, 0.95) < one_run_epsilon(500, 100, 90, 0, 0.95)
    with pytest.raises(ConfigError, match="impossible"):
        p_value(10, 11, 3, 1.0, 0.0)
