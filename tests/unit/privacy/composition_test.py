"""Three accountants against closed forms, quadrature, tables and each other."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import logsumexp
from scipy.stats import binom, norm

from vestige.privacy import composition
from vestige.privacy.accounting import (
    ACCOUNTANTS,
    epsilon,
)
from vestige.privacy.ledger import Event, merge
from vestige.privacy.noise_scales import joint_multiplier

few = settings(deadline=None, database=None, max_examples=8)


rates = st.floats(1e-3, 0.2)


noises = st.floats(0.6, 8.0)


deltas = st.floats(-9, -2).map(lambda exponent: 10.0**exponent)


def gaussian_delta(eps: float, sigma: float) -> float:
    """Balle and Wang 2018: the exact delta of the Gaussian mechanism."""
    upper, lower = 1 / (2 * sigma) - eps * sigma, -1 / (2 * sigma) - eps * sigma
    return float(norm.cdf(upper) - math.exp(eps) * norm.cdf(lower))


def remove_delta(eps: float, q: float, sigma: float) -> float:
    """Exact delta of one sampled release, mixture against noise alone."""
    cut = sigma**2 * math.log((math.exp(eps) - 1 + q) / q) + 0.5
    mixture = q * norm.sf((cut - 1) / sigma) + (1 - q) * norm.sf(cut / sigma)
    return float(mixture - math.exp(eps) * norm.sf(cut / sigma))


def add_delta(eps: float, q: float, sigma: float) -> float:
    """Exact delta of one sampled release, noise alone against mixture."""
    room = (math.exp(-eps) - 1 + q) / q
    if room <= 0:
        return 0.0
    cut = sigma**2 * math.log(room) + 0.5
    mixture = q * norm.cdf((cut - 1) / sigma) + (1 - q) * norm.cdf(cut / sigma)
    return float(norm.cdf(cut / sigma) - math.exp(eps) * mixture)


def epsilon_of(profile: Callable[[float], float], delta: float) -> float:
    return (
        float(brentq(lambda eps: profile(eps) - delta, 0.0, 200.0)) if profile(0) > delta else 0.0
    )


def renyi_moment(q: float, sigma: float, order: int) -> float:
    """Whole orders (Mironov, Talwar, Zhang 2019): a binomial mean of exp(k (k - 1) / 2 sigma^2)."""
    k = np.arange(order + 1)
    return float(logsumexp(binom.logpmf(k, order, q) + k * (k - 1) / (2 * sigma**2)))


def renyi_by_quadrature(q: float, sigma: float, order: float) -> float:
    """The Rényi divergence itself, by the trapezoid rule."""
    x = np.linspace(-12 * sigma, 12 * sigma + order, 200_001)
    log_ratio = np.logaddexp(math.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    log_density = norm.logpdf(x, scale=sigma) + order * log_ratio
    top = log_density.max()
    return float((top + math.log(np.trapezoid(np.exp(log_density - top), x))) / (order - 1))


def optimistic_epsilon(q: float, sigma: float, steps: int, delta: float, direction: str) -> float:
    """Lower bound on epsilon: every loss of one release rounded down to a grid, then composed.

    `steps` is a power of two. The tail beyond 9 standard deviations is dropped, which only lowers.
    """
    interval = 5e-4
    x = np.linspace(-9 * sigma, 9 * sigma + 1, 200_001)
    ratio = np.logaddexp(np.log1p(-q), math.log(q) + (2 * x - 1) / (2 * sigma**2))
    alone, shifted = norm.cdf(x, scale=sigma), norm.cdf(x, loc=1, scale=sigma)
    if direction == "remove":
        mass, low = np.diff((1 - q) * alone + q * shifted), ratio[:-1]
    else:
        mass, low = np.diff(alone), -ratio[1:]
    index = np.floor(low / interval).astype(int)
    offset = int(index.min())
    losses: NDArray[np.float64] = np.bincount(index - offset, weights=mass)
    for _ in range(steps.bit_length() - 1):
        size = 2 * len(losses) - 1
        losses = np.fft.irfft(np.fft.rfft(losses, 2 * size) ** 2, 2 * size)[:size]
        offset *= 2
    grid = (np.arange(len(losses)) + offset) * interval
    return epsilon_of(
        lambda eps: float((losses * -np.expm1(np.minimum(eps - grid, 0.0))).sum()), delta
    )


@pytest.mark.parametrize(
    ("sigma", "steps", "accountant", "expected"),
    [
        (1.1, 6250, "pld", 21.13),
        (1.1 / 0.9, 6250, "pld", 17.44),
        (1.1, 6250, "rdp_classic", 23.95),
        (1.1 / 0.9, 6250, "rdp_classic", 19.90),
    ],
)
def test_reference_values(sigma: float, steps: int, accountant: str, expected: float) -> None:
    found = epsilon([Event(0.04, sigma, steps)], 1e-5, accountant)
    assert found == pytest.approx(expected, abs=0.006)


@pytest.mark.parametrize(("groups", "expected"), [(3, 24.1), (6, 64.0), (21, 410.0)])
def test_reference_values_of_groups(groups: int, expected: float) -> None:
    sigma = joint_multiplier([1.1] * groups) / 0.95
    assert epsilon([Event(0.04, sigma, 1250)], 1e-5) == pytest.approx(expected, rel=2e-3)


# ALGORITHMS 1.2: q 0.04, sigma 1.1, delta 1e-5; per (steps, beta): rdp_classic, rdp, pld.
TABLE = {
    (625, 1.0): (6.79, 6.06, 5.51),
    (625, 0.95): (6.21, 5.53, 5.03),
    (625, 0.9): (5.67, 5.03, 4.58),
    (625, 0.8): (4.72, 4.15, 3.79),
    (625, 0.65): (3.52, 3.05, 2.79),
    (2500, 1.0): (13.99, 13.00, 12.00),
    (2500, 0.95): (12.79, 11.84, 10.94),
    (2500, 0.9): (11.69, 10.78, 9.97),
    (2500, 0.8): (9.72, 8.90, 8.22),
    (2500, 0.65): (7.23, 6.53, 6.03),
    (6250, 1.0): (23.95, 22.69, 21.13),
    (6250, 0.95): (21.85, 20.64, 19.21),
    (6250, 0.9): (19.90, 18.74, 17.44),
    (6250, 0.8): (16.41, 15.37, 14.29),
    (6250, 0.65): (12.07, 11.16, 10.37),
}


@pytest.mark.parametrize(("setting", "expected"), TABLE.items())
def test_the_table(setting: tuple[int, float], expected: tuple[float, float, float]) -> None:
    steps, beta = setting
    events = [Event(0.04, 1.1 / beta, steps)]
    found = [epsilon(events, 1e-5, name) for name in ("rdp_classic", "rdp", "pld")]
    assert found == pytest.approx(list(expected), abs=0.011)


@pytest.mark.parametrize("delta", [1e-9, 1e-5, 1e-2])
@pytest.mark.parametrize(("sigma", "count"), [(0.3, 1), (1.0, 1), (1.0, 25), (4.0, 3), (80.0, 1)])
def test_pld_without_sampling_is_the_analytic_gaussian(
    sigma: float, count: int, delta: float
) -> None:
    exact = epsilon_of(lambda eps: gaussian_delta(eps, sigma / math.sqrt(count)), delta)
    found = epsilon([Event(1.0, sigma, count)], delta)
    assert exact <= found <= exact * 1.002 + 1e-5


def test_pld_composes_different_noises_as_the_analytic_gaussian_does() -> None:
    sigmas = [2.0, 5.0, 3.0, 2.0]
    together = joint_multiplier(sigmas)
    exact = epsilon_of(lambda eps: gaussian_delta(eps, together), 1e-5)
    found = epsilon([Event(1.0, sigma) for sigma in sigmas], 1e-5)
    assert exact <= found <= exact * 1.002


def test_rdp_composes_different_noises_exactly() -> None:
    sigmas = [2.0, 5.0, 3.0, 2.0]
    events = [Event(1.0, sigma) for sigma in sigmas]
    one = [Event(1.0, joint_multiplier(sigmas))]
    for name in ("rdp", "rdp_classic"):
        assert epsilon(events, 1e-5, name) == pytest.approx(epsilon(one, 1e-5, name), rel=1e-9)


def test_a_noise_change_in_the_middle_costs_between_the_two() -> None:
    quiet, loud = Event(0.05, 1.0, 200), Event(0.05, 2.0, 200)
    for name in ACCOUNTANTS:
        mixed = epsilon([quiet, loud], 1e-5, name)
        cheap = epsilon([Event(0.05, 2.0, 400)], 1e-5, name)
        dear = epsilon([Event(0.05, 1.0, 400)], 1e-5, name)
        assert cheap < mixed < dear
        assert mixed > epsilon([quiet], 1e-5, name)


@pytest.mark.parametrize(
    ("q", "sigma", "delta"),
    [(0.04, 1.1, 1e-5), (0.3, 0.7, 1e-3), (0.01, 0.5, 1e-4), (0.9, 3, 1e-6)],
)
def test_pld_of_one_release_is_exact_in_the_worse_direction(
    q: float, sigma: float, delta: float
) -> None:
    found = epsilon([Event(q, sigma)], delta)
    remove = epsilon_of(lambda eps: remove_delta(eps, q, sigma), delta)
    add = epsilon_of(lambda eps: add_delta(eps, q, sigma), delta)
    assert max(add, remove) <= found <= max(add, remove) * 1.002


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [(0.1, 1.0, 32, 1e-5), (0.3, 0.8, 16, 1e-4), (0.02, 1.0, 32, 1e-6)],
)
def test_pld_is_above_a_lower_bound_in_both_directions_and_close_to_it(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    found = epsilon([Event(q, sigma, steps)], delta)
    lower = [optimistic_epsilon(q, sigma, steps, delta, way) for way in ("add", "remove")]
    assert max(lower) <= found
    # Rounding down loses half an interval per release on average, a whole one at most.
    assert found <= max(lower) + steps * 5e-4 + 0.002 * found


def test_pld_agrees_with_the_library_on_its_own_grid() -> None:
    import dp_accounting
    from dp_accounting import pld

    events = [Event(0.02, 0.9, 300), Event(0.05, 2.0, 100)]
    reference = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 2e-4)
    for event in events:
        gaussian = dp_accounting.GaussianDpEvent(event.noise_multiplier)
        sampled = dp_accounting.PoissonSampledDpEvent(event.sample_rate, gaussian)
        reference.compose(dp_accounting.SelfComposedDpEvent(sampled, event.count))
    assert epsilon(events, 1e-6) == pytest.approx(reference.get_epsilon(1e-6), rel=1e-3)


def test_large_counts_composed_in_stages_agree_with_the_limit() -> None:
    """A million tiny releases are a Gaussian in the limit (Dong, Roth, Su 2019)."""
    q, sigma, steps = 1e-4, 5.0, 1_000_003
    mu = q * math.sqrt(steps * math.expm1(sigma**-2))
    limit = epsilon_of(lambda eps: gaussian_delta(eps, 1 / mu), 1e-5)
    assert epsilon([Event(q, sigma, steps)], 1e-5) == pytest.approx(limit, rel=0.01)


@pytest.mark.parametrize(("q", "sigma"), [(0.04, 1.1), (0.3, 2.0), (0.01, 0.5)])
def test_rdp_at_whole_orders_is_the_binomial_form(q: float, sigma: float) -> None:
    bounds = composition.renyi_of_one(q, sigma)
    curve = dict(zip(composition.renyi_orders(), bounds, strict=True))
    for order in (2, 3, 5, 8, 17, 30):
        assert curve[order] == pytest.approx(renyi_moment(q, sigma, order) / (order - 1), rel=1e-8)


@pytest.mark.parametrize(
    ("q", "sigma"), [(0.04, 1.1), (0.5, 30.0), (0.5, 0.7), (0.04, 0.25), (0.9, 1.0)]
)
def test_rdp_at_fractional_orders_is_an_upper_bound(q: float, sigma: float) -> None:
    """Some of these orders do not converge in the library and come from a chord."""
    for order, bound in zip(
        composition.renyi_orders(), composition.renyi_of_one(q, sigma), strict=True
    ):
        if order < 8 and order % 1:
            exact = renyi_by_quadrature(q, sigma, order)
            assert exact * (1 - 1e-6) <= bound < exact * 3


def test_the_classic_conversion_is_the_papers() -> None:
    q, sigma, steps, delta = 0.02, 1.5, 400, 1e-5
    by_order = [
        steps * renyi_moment(q, sigma, order) / (order - 1) + math.log(1 / delta) / (order - 1)
        for order in range(2, 40)
    ]
    found = epsilon([Event(q, sigma, steps)], delta, "rdp_classic")
    assert found == pytest.approx(min(by_order), rel=1e-3)


def test_library_warnings_about_orders_do_not_reach_the_user(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.WARNING):
        epsilon([Event(0.5, 0.701)], 1e-5, "rdp")
    assert not caplog.records
    assert not logging.getLogger("absl").disabled


@given(rates, noises, st.integers(1, 2000), deltas)
@few
def test_accountants_are_ordered_and_never_negative(
    q: float, sigma: float, steps: int, delta: float
) -> None:
    events = [Event(q, sigma, steps)]
    pld, rdp, classic = (epsilon(events, delta, name) for name in ACCOUNTANTS)
    assert 0 <= pld <= rdp <= classic < math.inf


def check_monotone(
    name: str, slack: float, q: float, sigma: float, steps: int, delta: float
) -> None:
    base = epsilon([Event(q, sigma, steps)], delta, name)
    ceiling = base * (1 + slack) + 1e-9
    assert epsilon([Event(q, sigma, max(1, steps // 2))], delta, name) <= ceiling
    assert epsilon([Event(q / 1.3, sigma, steps)], delta, name) <= ceiling
    assert epsilon([Event(q, sigma * 1.3, steps)], delta, name) <= ceiling
    assert epsilon([Event(q, sigma, steps)], min(0.5, delta * 3), name) <= ceiling
    if base > 0.1:
        # Not only never up: clearly down, so a constant answer fails.
        assert epsilon([Event(q, sigma * 3, steps)], delta, name) < base
        assert epsilon([Event(q, sigma, 3 * steps)], delta, name) > base


@given(rates, noises, st.integers(1, 2000), deltas)
@few
def test_rdp_is_monotone(q: float, sigma: float, steps: int, delta: float) -> None:
    check_monotone("rdp", 1e-9, q, sigma, steps, delta)
    check_monotone("rdp_classic", 1e-9, q, sigma, steps, delta)


@given(rates, noises, st.integers(1, 2000), deltas)
@settings(few, max_examples=4)
def test_pld_is_monotone(q: float, sigma: float, steps: int, delta: float) -> None:
    check_monotone("pld", 1e-3, q, sigma, steps, delta)


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_nothing_released_costs_nothing(name: str) -> None:
    assert epsilon([], 1e-5, name) == 0.0
    assert epsilon([Event(0.1, math.inf, 1000)], 1e-5, name) == 0.0


@pytest.mark.parametrize("name", ACCOUNTANTS)
def test_infinite_noise_adds_nothing_and_no_noise_costs_everything(name: str) -> None:
    event = Event(0.1, 1.0, 10)
    assert epsilon([event, Event(0.1, math.inf)], 1e-5, name) == epsilon([event], 1e-5, name)
    assert epsilon([event, Event(1e-6, 0.0)], 1e-5, name) == math.inf


def test_enough_noise_reaches_zero() -> None:
    assert epsilon([Event(0.01, 1e6, 100)], 1e-5) == 0.0
    assert epsilon([Event(0.01, 1e300, 100)], 1e-5) == 0.0


@pytest.mark.parametrize(
    ("q", "sigma", "steps", "delta"),
    [
        (0.04, 0.05, 6250, 1e-5),
        (0.04, 0.05, 1, 1e-5),
        (0.5, 1e-5, 10**9, 1e-5),
        (1.0, 0.03, 1, 1e-5),
        (1e-9, 1.0, 10**9, 1e-9),
        (1e-9, 1e8, 10**9, 1e-6),
        (0.04, 1e7, 10**9, 1e-5),
        (0.04, 1.1, 6250, 1e-200),
        (1 - 1e-12, 2.0, 100, 1e-5),
    ],
)
def test_extremes_are_finite_and_ordered(q: float, sigma: float, steps: int, delta: float) -> None:
    """Neither gigabytes for a huge epsilon, nor rounding noise for a tiny one, nor NaN."""
    events = [Event(q, sigma, steps)]
    pld, rdp, classic = (epsilon(events, delta, name) for name in ACCOUNTANTS)
    assert 0 <= pld <= rdp <= classic < math.inf


def test_a_nan_of_the_library_never_becomes_a_small_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from dp_accounting.pld import privacy_loss_distribution as pld

    monkeypatch.setattr(
        pld.PrivacyLossDistribution, "get_epsilon_for_delta", lambda self, delta: math.nan
    )
    assert composition.pld_epsilon((Event(0.1, 1.0),), 1e-5) == math.inf


def test_deltas_below_the_precision_of_the_transform_are_left_to_rdp() -> None:
    events = [Event(0.04, 1.1, 100)]
    assert epsilon(events, 1e-12) == epsilon(events, 1e-12, "rdp")
    assert epsilon(events, 1e-12) > epsilon(events, 1e-9)


def test_a_schedule_with_many_noises_is_rounded_pessimistically() -> None:
    events = [Event(0.04, 1 + step / 1000) for step in range(1000)]
    coarse = composition.coarsened(tuple(events))
    assert len(coarse) <= 64
    assert sum(event.count for event in coarse) == 1000
    exact = sum(renyi_moment(0.04, event.noise_multiplier, 4) / 3 for event in events)
    rounded = sum(e.count * renyi_moment(0.04, e.noise_multiplier, 4) / 3 for e in coarse)
    assert exact <= rounded <= exact * 1.05


@given(
    st.lists(st.tuples(st.floats(1e-4, 1.0), st.floats(0.1, 100.0)), min_size=65, max_size=120),
    st.booleans(),
)
@settings(few, max_examples=30)
def test_rounding_a_schedule_never_lowers_its_cost(
    pairs: list[tuple[float, float]], same_rate: bool
) -> None:
    events = merge(Event(0.1 if same_rate else q, sigma) for q, sigma in pairs)
    assume(len(events) > 64)
    coarse = composition.coarsened(events)
    assert len(coarse) <= 64
    # Each event, taken in turn, finds a rounded one that reveals at least as much, used up once.
    room = {event: event.count for event in coarse}
    for event in sorted(events, key=lambda e: (e.noise_multiplier, -e.sample_rate)):
        for rounded in room:
            if (
                room[rounded] >= event.count
                and rounded.noise_multiplier <= event.noise_multiplier
                and rounded.sample_rate >= event.sample_rate
                and (not same_rate or rounded.sample_rate == event.sample_rate)
            ):
                room[rounded] -= event.count
                break
        else:
            pytest.fail(f"{event} was rounded to something cheaper")


def test_equal_ledgers_are_accounted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    original = composition.pld_epsilon

    def counted(events: tuple[Event, ...], delta: float) -> float:
        calls.append(events)
        return original(events, delta)

    monkeypatch.setattr(composition, "pld_epsilon", counted)
    composition.cached_epsilon.cache_clear()
    one = epsilon([Event(0.1, 3.0, 2), Event(0.1, 4.0), Event(0.1, 3.0)], 1e-5)
    two = epsilon([Event(0.1, 4.0), Event(0.1, 3.0, 3)], 1e-5, "prv")
    assert one == two
    assert len(calls) == 1


# -- several records of one person -----------------------------------------------------------------


def mixture_deltas(eps: float, q: float, sigma: float, records: int) -> tuple[float, float]:
    """Exact deltas of one release for several records, by quadrature: removed, and added."""
    x = np.linspace(-12 * sigma, records + 12 * sigma, 400_001)
    counts = np.arange(records + 1)
    weights = binom.pmf(counts, records, q)
    there = (weights * norm.pdf(x[:, None], counts, sigma)).sum(1)
    absent = norm.pdf(x, 0, sigma)
    step = float(x[1] - x[0])
    pairs = ((there, absent), (absent, there))
    removed, added = (np.maximum(p - math.exp(eps) * r, 0).sum() * step for p, r in pairs)
    return float(removed), float(added)


@pytest.mark.parametrize("records", [1, 2, 5])
@pytest.mark.parametrize(("q", "sigma"), [(0.3, 1.0), (0.05, 0.7), (0.6, 2.0)])
def test_several_records_in_one_release_cost_what_quadrature_says(q, sigma, records):
    found = composition.group_epsilon((Event(q, sigma),), records, 1e-3)
    assert max(mixture_deltas(found, q, sigma, records)) <= 1e-3 * (1 + 1e-6)
    assert max(mixture_deltas(0.98 * found, q, sigma, records)) > 1e-3


@pytest.mark.parametrize(("records", "published"), [(2, 1.98), (5, 5.64), (10, 13.1)])
def test_several_records_cost_what_was_computed_before(records, published):
    event = Event(0.01, 1.5, 1000)
    assert epsilon([event], 1e-5) == pytest.approx(0.919, abs=2e-3)
    found = composition.group_epsilon((event,), records, 1e-5)
    assert float(f"{found:.3g}") == published


@pytest.mark.parametrize("records", [2, 10])
def test_several_records_without_sampling_are_one_longer_shift(records):
    found = composition.group_epsilon((Event(1.0, 12.0, 4),), records, 1e-5)
    exact = brentq(lambda eps: gaussian_delta(eps, 6.0 / records) - 1e-5, 0, 100)
    assert exact <= found <= 1.01 * exact


def test_one_record_costs_what_it_does_by_itself():
    event = Event(0.02, 1.1, 300)
    assert composition.group_epsilon((event,), 1, 1e-5) == pytest.approx(
        epsilon([event], 1e-5), rel=5e-3
    )


def test_more_records_and_events_cost_more():
    one, two = Event(0.05, 1.5, 20), Event(0.1, 2.0, 10)
    alone = [composition.group_epsilon((one,), records, 1e-5) for records in (1, 2, 3)]
    assert alone == sorted(alone)
    assert composition.group_epsilon((one, two), 3, 1e-5) > alone[-1]


def test_nothing_released_costs_no_group_anything():
    assert composition.group_epsilon((), 5, 1e-5) == 0.0


def test_what_would_take_long_or_is_not_resolved_has_no_figure():
    many = tuple(Event(0.1, 1 + step / 10) for step in range(5))
    assert composition.group_epsilon(many, 2, 1e-5) == math.inf
    assert composition.group_epsilon((Event(0.1, 1.0),), 2, 1e-12) == math.inf
    assert composition.group_epsilon((Event(0.5, 0.2, 50),), 5, 1e-5) == math.inf


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp_classic"])
def test_a_rate_that_is_hardly_a_number_has_an_epsilon(accountant):
    """Rates are rounded up to where logarithms are finite."""
    usual = composition.composed_epsilon([Event(1e-100, 1.0, 10)], 1e-5, accountant)
    for rate in (5e-324, 1e-320, 1e-310, 1e-200):
        assert composition.composed_epsilon([Event(rate, 1.0, 10)], 1e-5, accountant) == usual
