"""Epsilons against closed forms, independent references and each other; calibration never above.

References written here share no code with the library: the analytic Gaussian mechanism, the exact
privacy profile of one sampled release in both directions, the binomial form of the Rényi moments,
and a privacy loss distribution with losses rounded *down*, which is a lower bound.
"""

from __future__ import annotations

import math
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.accounting import (
    ACCOUNTANTS,
    Calibration,
    Charge,
    _search,
    accountant_name,
    calibrate,
    epsilon,
)
from vestige.privacy.ledger import Event
from vestige.privacy.noise_scales import joint_multiplier

few = settings(deadline=None, database=None, max_examples=8)


rates = st.floats(1e-3, 0.2)


def gaussian_delta(eps: float, sigma: float) -> float:
    """Balle and Wang 2018: the exact delta of the Gaussian mechanism."""
    upper, lower = 1 / (2 * sigma) - eps * sigma, -1 / (2 * sigma) - eps * sigma
    return float(norm.cdf(upper) - math.exp(eps) * norm.cdf(lower))


def test_names() -> None:
    assert [accountant_name(name) for name in ACCOUNTANTS] == ["pld", "rdp", "rdp_classic"]
    assert accountant_name("prv") == "pld"
    with pytest.raises(ConfigError, match=r"gdp.*pld, rdp, rdp_classic"):
        accountant_name("gdp")
    with pytest.raises(ConfigError, match="moments"):
        epsilon([], 1e-5, "moments")


@pytest.mark.parametrize("delta", [0.0, 1.0, -1e-5, 2.0, math.nan, True, "1e-5"])
def test_a_bad_delta_is_refused(delta: float) -> None:
    with pytest.raises(ConfigError, match="delta"):
        epsilon([Event(0.1, 1.0)], delta)


@given(
    rates,
    st.integers(1, 3000),
    st.floats(-9, -3).map(lambda exponent: 10.0**exponent),
    st.floats(0.3, 30.0),
    st.sampled_from(["rdp", "rdp_classic"]),
    st.sampled_from([1.0, 0.9]),
)
@settings(few, max_examples=6)
def test_calibrated_noise_is_never_above_the_target_and_tight(
    q: float, steps: int, delta: float, target: float, name: str, beta: float
) -> None:
    found = calibrate(target, delta, q, steps, name, beta)
    again = epsilon([Event(q, found.noise_multiplier / beta, steps)], delta, name)
    assert found.epsilon == again <= target
    less = Event(q, found.noise_multiplier / beta * 0.999, steps)
    assert epsilon([less], delta, name) > target


@pytest.mark.parametrize(
    ("target", "delta", "q", "steps", "beta"),
    [
        (3.0, 1e-5, 0.04, 500, 1.0),
        (8.0, 1e-6, 0.1, 100, 0.8),
        (0.2, 1e-5, 0.01, 200, 1.0),
        (1.0, 1e-5, 1.0, 1, 1.0),
    ],
)
def test_calibration_by_pld_is_never_above_the_target_and_tight(
    target: float, delta: float, q: float, steps: int, beta: float
) -> None:
    found = calibrate(target, delta, q, steps, beta=beta)
    again = epsilon([Event(q, found.noise_multiplier / beta, steps)], delta)
    assert found.epsilon == again <= target
    assert epsilon([Event(q, found.noise_multiplier / beta * 0.999, steps)], delta) > target
    # A caller may arrive at the multiplier through groups and lose a few last digits.
    detour = joint_multiplier([found.noise_multiplier * math.sqrt(7)] * 7) / beta
    assert epsilon([Event(q, detour, steps)], delta) <= target


def test_calibration_without_sampling_is_the_analytic_gaussian() -> None:
    sigma = calibrate(1.0, 1e-5, 1.0, 1).noise_multiplier
    assert gaussian_delta(1.0, sigma) <= 1e-5 <= gaussian_delta(1.0, sigma * 0.998)


def test_the_search_undercuts_the_target_a_little() -> None:
    """On an exact power law the root is hit to the last digit: only the margin keeps it below."""
    noise = _search(lambda noise: 2 / noise, 1.0, 1.0, 1.0, tolerance=1e-4)
    assert noise is not None
    assert 1 - 3e-4 <= 2 / noise <= 1 - 0.9e-6


def test_beta_is_not_folded_into_the_noise() -> None:
    plain = calibrate(2.0, 1e-5, 0.05, 100, "rdp")
    mixed = calibrate(2.0, 1e-5, 0.05, 100, "rdp", beta=0.5)
    assert mixed.noise_multiplier == pytest.approx(plain.noise_multiplier / 2, rel=1e-3)
    assert isinstance(mixed, Calibration)
    assert (mixed.accountant, mixed.beta, mixed.steps) == ("rdp", 0.5, 100)


@pytest.mark.slow
@given(
    st.floats(1e-4, 0.3),
    st.integers(1, 20_000),
    st.floats(-9, -3).map(lambda exponent: 10.0**exponent),
    st.floats(0.1, 50.0),
)
@settings(few, max_examples=25)
def test_calibration_by_pld_everywhere(q: float, steps: int, delta: float, target: float) -> None:
    found = calibrate(target, delta, q, steps)
    event = Event(q, found.noise_multiplier, steps)
    assert epsilon([event], delta) <= target
    # Calibrated with the tightest bound, so the others report more, never the reverse.
    assert epsilon([event], delta, "rdp") >= found.epsilon


def test_a_very_large_target_still_gets_noise() -> None:
    found = calibrate(1e12, 1e-5, 0.04, 100)
    assert found.noise_multiplier == pytest.approx(1e-3)
    assert found.epsilon <= 1e12


def test_an_unreachable_target_is_refused() -> None:
    # The classic conversion cannot go below log(1/delta) / (largest order - 1).
    with pytest.raises(ConfigError, match=r"0\.001 cannot be reached"):
        calibrate(0.001, 1e-5, 0.01, 100, "rdp_classic")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"target_epsilon": 0.0}, "target_epsilon"),
        ({"target_epsilon": -1.0}, "target_epsilon"),
        ({"target_epsilon": math.inf}, "target_epsilon"),
        ({"target_epsilon": math.nan}, "target_epsilon"),
        ({"delta": 1.0}, "delta"),
        ({"sample_rate": 0.0}, "sample_rate"),
        ({"sample_rate": 1.5}, "sample_rate"),
        ({"steps": 0}, "count 0"),
        ({"steps": 10.0}, "count 10.0"),
        ({"accountant": "gdp"}, "gdp"),
        ({"beta": 0.0}, "beta"),
        ({"beta": 1.1}, "beta"),
    ],
)
def test_bad_calibration_arguments_are_refused(changed: dict[str, object], message: str) -> None:
    good: dict[str, object] = {
        "target_epsilon": 1.0,
        "delta": 1e-5,
        "sample_rate": 0.1,
        "steps": 10,
    }
    with pytest.raises(ConfigError, match=message):
        calibrate(**(good | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("room", [0.9, 0.999, 1.0, 1.0005, 1.0015, 1.01, 1.5])
def test_noise_beside_what_was_spent_is_found_or_refused_at_once(accountant, room):
    """The less is left, the flatter epsilon is in the noise: the search must not crawl."""
    earlier, charges = [Event(0.05, 1.0, 40)], {Charge(0.05): 40}
    spent = accounting.epsilon(earlier, 1e-5, accountant)
    started = time.process_time()
    if room < 1.001:
        with pytest.raises(ConfigError, match=r"used up by the ledger: the 40 releases on it"):
            accounting.noise_for(room * spent, 1e-5, charges, accountant, earlier)
    else:
        noise, reached = accounting.noise_for(room * spent, 1e-5, charges, accountant, earlier)
        assert reached <= room * spent
        events = [*earlier, *accounting.events_of(charges, noise)]
        assert reached == accounting.epsilon(events, 1e-5, accountant)
        # Ten per cent less noise would be too little.
        less = [*earlier, *accounting.events_of(charges, 0.9 * noise)]
        assert accounting.epsilon(less, 1e-5, accountant) > room * spent
    assert time.process_time() - started < 60


def test_a_ledger_without_a_guarantee_leaves_nothing_of_a_target():
    with pytest.raises(ConfigError, match="used up by the ledger"):
        accounting.noise_for(5.0, 1e-5, {Charge(0.05): 4}, earlier=[Event(0.05, 0.0)])
