"""Epsilons against closed forms, independent references and each other; calibration never above.

References written here share no code with the library: the analytic Gaussian mechanism, the exact
privacy profile of one sampled release in both directions, the binomial form of the Rényi moments,
and a privacy loss distribution with losses rounded *down*, which is a lower bound.
"""

from __future__ import annotations

import json
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
    budget,
    calibrate,
    calibration_report,
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


def test_budget_of_a_joint_multiplier() -> None:
    report = budget(0.04, 6250, 1e-5, noise_multiplier=1.1, beta=0.9)
    assert report["epsilon"] == pytest.approx(
        {"pld": 17.44, "rdp": 18.74, "rdp_classic": 19.90}, abs=0.006
    )
    del report["epsilon"]
    assert report == {
        "sigma_eff": 1.1 / 0.9,
        "noise_multiplier": 1.1,
        "group_noise_multiplier": None,
        "groups": 1,
        "beta": 0.9,
        "sample_rate": 0.04,
        "steps": 6250,
        "delta": 1e-5,
        "guarantee": "(epsilon, delta)-DP, add or remove one record",
        "marginal_epsilon": None,
    }


def test_budget_of_groups_prints_the_marginal_as_a_diagnostic() -> None:
    report = budget(0.04, 1250, 1e-5, beta=0.95, group_noise_multiplier=1.1, groups=3)
    assert report["noise_multiplier"] == pytest.approx(1.1 / math.sqrt(3))
    assert report["sigma_eff"] == pytest.approx(1.1 / 0.95 / math.sqrt(3))
    assert report["group_noise_multiplier"] == 1.1
    assert report["groups"] == 3
    assert report["epsilon"]["pld"] == pytest.approx(24.1, abs=0.05)
    assert report["marginal_epsilon"]["pld"] == pytest.approx(
        epsilon([Event(0.04, 1.1 / 0.95, 1250)], 1e-5)
    )
    assert set(report["marginal_epsilon"]) == set(ACCOUNTANTS)
    assert report["marginal_note"] == "diagnostic, not a guarantee"


def test_one_group_has_no_marginal() -> None:
    report = budget(0.1, 10, 1e-5, group_noise_multiplier=2.0)
    assert report["marginal_epsilon"] is None
    assert "marginal_note" not in report
    assert report["epsilon"] == budget(0.1, 10, 1e-5, noise_multiplier=2.0)["epsilon"]


def test_budget_without_noise_is_null_and_no_guarantee() -> None:
    report = budget(0.1, 10, 1e-5, noise_multiplier=0.0)
    assert report["epsilon"] == {"pld": None, "rdp": None, "rdp_classic": None}
    assert report["guarantee"] == "none"
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "neither"),
        ({"noise_multiplier": 1.0, "group_noise_multiplier": 1.0}, "both"),
        ({"noise_multiplier": 1.0, "groups": 2}, "group_noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier -1.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier inf"),
        ({"group_noise_multiplier": math.nan}, "group_noise_multiplier nan"),
        ({"group_noise_multiplier": 1.0, "groups": 0}, "groups 0"),
        ({"group_noise_multiplier": 1.0, "groups": 2.0}, "groups 2.0"),
        ({"noise_multiplier": 1.0, "beta": 0.0}, "beta"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta"),
        ({"noise_multiplier": 1.0, "steps": 0}, "count 0"),
        ({"noise_multiplier": 1.0, "sample_rate": 1.2}, "sample_rate"),
    ],
)
def test_bad_budget_arguments_are_refused(changed: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"sample_rate": 0.1, "steps": 10, "delta": 1e-5}
    with pytest.raises(ConfigError, match=message):
        budget(**(good | changed))  # type: ignore[arg-type]


def test_calibration_report() -> None:
    report = calibration_report(2.0, 1e-5, 0.05, 100, beta=0.8, groups=4, accountant="rdp")
    found = calibrate(2.0, 1e-5, 0.05, 100, "rdp", 0.8)
    assert report == {
        "noise_multiplier": found.noise_multiplier,
        "group_noise_multiplier": found.noise_multiplier * 2,
        "sigma_eff": found.noise_multiplier / 0.8,
        "epsilon": found.epsilon,
        "target_epsilon": 2.0,
        "delta": 1e-5,
        "sample_rate": 0.05,
        "steps": 100,
        "beta": 0.8,
        "groups": 4,
        "accountant": "rdp",
    }
    assert report["epsilon"] <= 2.0


def test_calibrated_groups_spend_what_the_report_says() -> None:
    report = calibration_report(5.0, 1e-5, 0.05, 50, beta=0.9, groups=3, accountant="prv")
    spent = budget(
        0.05,
        50,
        1e-5,
        beta=0.9,
        group_noise_multiplier=report["group_noise_multiplier"],
        groups=3,
    )
    assert report["accountant"] == "pld"
    assert spent["epsilon"]["pld"] <= 5.0
    assert spent["epsilon"]["pld"] == pytest.approx(report["epsilon"], rel=1e-6)


def test_calibration_report_refuses_bad_groups() -> None:
    with pytest.raises(ConfigError, match="groups 0"):
        calibration_report(1.0, 1e-5, 0.1, 10, groups=0)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("room", [0.9, 0.999, 1.0, 1.0005, 1.0015, 1.01, 1.5])
def test_noise_beside_what_was_spent_is_found_or_refused_at_once(accountant, room):
    """The less is left, the flatter epsilon is in the noise: the search must not crawl."""
    earlier, charges = [Event(0.05, 1.0, 40)], {Charge(0.05): 40}
    spent = accounting.epsilon(earlier, 1e-5, accountant)
    started = time.perf_counter()
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
    assert time.perf_counter() - started < 20


def test_a_ledger_without_a_guarantee_leaves_nothing_of_a_target():
    with pytest.raises(ConfigError, match="used up by the ledger"):
        accounting.noise_for(5.0, 1e-5, {Charge(0.05): 4}, earlier=[Event(0.05, 0.0)])
