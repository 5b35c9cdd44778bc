"""Curves, mu and groups of records: every number is a bound, or marked as what it is."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.stats import norm

from tests.support.statements import EVENTS
from vestige.privacy import accounting
from vestige.privacy.composition import prepared
from vestige.privacy.ledger import Event
from vestige.statement import curves


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("kind", list(EVENTS))
def test_the_curve_is_what_the_accountant_says(kind: str, accountant: str) -> None:
    events, claimed = EVENTS[kind], 2e-6
    curve = curves.epsilon_curve(events, claimed, accountant)
    deltas, epsilons = zip(*curve, strict=True)
    assert deltas == tuple(sorted({*curves.DELTAS, claimed}))
    assert (deltas[0], deltas[-1]) == (1e-10, 1e-2)
    assert all(a >= b for a, b in itertools.pairwise(epsilons))
    for delta in (claimed, 1e-10, 1e-2):
        assert dict(curve)[delta] == accounting.epsilon(events, delta, accountant)


def best_tests(event: Event) -> list[list[tuple[float, float]]]:
    """(false alarms, misses) of the best tests of one subsampled Gaussian, in both directions."""
    rate, sigma = event.sample_rate, event.noise_multiplier
    thresholds = np.linspace(-8 * sigma, 1 + 8 * sigma, 4000)
    absent = norm.cdf(thresholds / sigma)
    present = (1 - rate) * absent + rate * norm.cdf((thresholds - 1) / sigma)
    added = list(zip(1 - absent, present, strict=True))
    return [added, [(misses, alarms) for alarms, misses in added]]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "event", [Event(1.0, 1.0), Event(1.0, 0.25), Event(0.3, 0.7)], ids=["mu1", "mu4", "sampled"]
)
def test_no_test_makes_fewer_errors_than_the_trade_off_curve(event: Event, accountant: str) -> None:
    curve = curves.epsilon_curve([event], 1e-5, accountant)
    bounds = curves.trade_off([event], accountant, curve)
    assert len(bounds) == len(curves.FALSE_ALARMS)
    for tests in best_tests(event):
        alarms, misses = zip(*sorted(tests), strict=True)
        for alpha, bound in bounds:
            best = float(np.interp(alpha, alarms, misses))
            assert 0 <= bound <= best + 1e-5, (alpha, bound, best)
            if accountant == "pld" and event.sample_rate == 1:
                assert bound >= best - 5e-3, (alpha, bound, best)


def test_the_curve_of_one_gaussian_is_the_closed_form_and_above_each_of_its_pairs() -> None:
    events, x = [Event(1.0, 1.0)], np.linspace(0.01, 0.99, 50)
    pairs = curves.epsilon_curve(events, 1e-5, "pld")
    found = np.array(curves.trade_off(events, "pld", pairs, alarms=x.tolist()))
    assert (found[:, 0] == x).all()
    assert np.abs(found[:, 1] - norm.cdf(norm.ppf(1 - x) - 1.0)).max() < 0.01
    delta = curves.gaussian_delta(1.0, 2.0)
    assert all(at_least >= curves.misses(a, delta, 2.0) - 1e-3 for a, at_least in found)


def test_a_trade_off_curve_of_more_noise_is_nowhere_lower() -> None:
    less, more = (
        dict(curves.trade_off(e, "rdp", curves.epsilon_curve(e, 1e-5, "rdp")))
        for e in ([Event(0.1, 0.8, 50)], [Event(0.1, 1.6, 50)])
    )
    assert all(more[alpha] >= less[alpha] for alpha in less)
    assert more[0.05] > less[0.05]


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0, 6.0])
def test_mu_of_one_gaussian_is_its_own(mu: float) -> None:
    curve = curves.epsilon_curve([Event(1.0, 1 / mu)], 1e-5, "pld")
    for delta, epsilon in curve:
        if epsilon > 0:
            found = curves.gaussian_mu(delta, epsilon)
            assert found == pytest.approx(mu, rel=2e-3)
            assert found > mu * (1 - 1e-6)
            assert curves.gaussian_delta(found, epsilon) == pytest.approx(delta, rel=1e-6)


def test_several_records_cost_at_least_what_they_do_in_one_gaussian() -> None:
    """With one release and no sampling, k records are a shift of k: the exact cost is known."""
    event = Event(1.0, 8.0)
    bounds = curves.of_several_records([event], 1e-5)
    assert tuple(bounds) == curves.GROUP_SIZES
    for records, bound in bounds.items():
        exact = accounting.epsilon([Event(1.0, 8.0 / records)], 1e-5, "pld")
        assert exact < bound < math.inf
        assert bound >= records * accounting.epsilon([event], 1e-5, "rdp")


def test_many_different_events_are_rounded_as_the_accountant_does() -> None:
    events = [Event(1.0, 4 + step / 50, 1) for step in range(70)]
    assert len(prepared(events)) <= 64
    for accountant in ("rdp", "rdp_classic"):
        assert curves.epsilons(events, [1e-5], accountant) == [
            accounting.epsilon(events, 1e-5, accountant)
        ]
    with_none = [*events, Event(1.0, 0.0)]
    assert curves.epsilons(with_none, [1e-5], "pld") == [math.inf]


def test_plain_releases_have_the_smaller_bound_and_others_the_general_rule() -> None:
    event = Event(0.01, 1.5, 1000)
    general = curves.of_several_records([event], 1e-5)
    plain = curves.of_several_records([event], 1e-5, plain=True)
    assert tuple(plain) == tuple(general) == curves.GROUP_SIZES
    assert all(plain[records] < 0.9 * general[records] for records in plain)
    assert list(plain.values()) == sorted(plain.values())
    limit = (3.0, 1e-5)
    assert curves.of_several_records([event], 1e-5, limit, plain=True) == (
        curves.of_several_records([event], 1e-5, limit)
    )
    silent = curves.of_several_records([Event(0.1, 0.0)], 1e-5, plain=True)
    assert set(silent.values()) == {math.inf}
