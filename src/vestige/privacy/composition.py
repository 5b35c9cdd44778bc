"""The numerics of accounting: epsilon of composed Poisson-subsampled Gaussians, three ways.

* ``pld``: composes the privacy loss distributions of both directions (add and remove) numerically,
  on a grid whose rounding can only overstate the loss (Koskela, Jälkö, Honkela 2020,
  arXiv:1906.03049; Gopi, Lee, Wutschitz 2021, arXiv:2106.02848; the discretisation is "connect the
  dots", Doroshenko et al. 2022, arXiv:2207.04380, as implemented by dp-accounting). The tightest.
* ``rdp``: Rényi DP of the sampled Gaussian (Mironov 2017, arXiv:1702.07476; Mironov, Talwar, Zhang
  2019, arXiv:1908.10530) with the conversion of Balle et al. 2020 (arXiv:1905.09982) and
  Canonne, Kamath, Steinke 2020 (arXiv:2004.00010).
* ``rdp_classic``: the same curve with the conversion of Mironov 2017, as printed in the papers.

What a private search costs is known as a Rényi curve alone (selection.py): together with one, pld
answers as rdp. dp-accounting does the numerics and is imported where it is used: it takes a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vestige.privacy.events import Event, merge
from vestige.privacy.selection import Selection

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# Below this multiplier the true epsilon exceeds 1e11; infinity is an honest upper bound. Above the
# other, releases are accounted as if they had no more noise than that: squares must not overflow.
_SMALLEST_NOISE = 1e-6
_LARGEST_NOISE = 1e8
_SMALLEST_RATE = 1e-100  # smaller ones are rounded up: logarithms of denormal numbers overflow
# exp(-loss) underflows near a loss of 745: beyond this epsilon the PLD sums lose their precision.
LARGEST_PLD_EPSILON = 700.0
# Rounding of the FFT moves a delta by less than 1e-13 (measured up to 1e8 releases). It is taken
# off the delta that is asked for, and deltas it could matter for are left to RDP.
FFT_NOISE = 1e-12
SMALLEST_PLD_DELTA = 100 * FFT_NOISE
_MAX_DISTINCT_EVENTS = 64  # more are rounded pessimistically onto a common grid first
_MOST_IN_GROUPS = 4  # distinct events whose mixtures are composed for several records


def composed_epsilon(events: Iterable[Event], delta: float, accountant: str) -> float:
    """An upper bound on epsilon at `delta`, by one of the three accountants; answers are cached."""
    ready = prepared(events)
    if not ready:
        return 0.0
    return math.inf if _has_no_noise(ready) else cached_epsilon(ready, delta, accountant)


def prepared(events: Iterable[Event]) -> tuple[Event, ...]:
    """The events as every accountant composes them: merged, and many different ones rounded.

    Asking about these gives the same answer sooner. Infinite noise reveals nothing and is left out.
    """
    every = merge(events)
    searches = tuple(event for event in every if event.selection is not None)
    merged = merge(
        Event(max(e.sample_rate, _SMALLEST_RATE), min(e.noise_multiplier, _LARGEST_NOISE), e.count)
        for e in every
        if e.selection is None and e.noise_multiplier < math.inf
    )
    return (*searches, *(merged if _has_no_noise(merged) else coarsened(merged)))


def _has_no_noise(events: Iterable[Event]) -> bool:
    """Whether one of them reveals everything."""
    return any(noise < _SMALLEST_NOISE for event in events for noise in event.multipliers)


@lru_cache(maxsize=4096)
def cached_epsilon(events: tuple[Event, ...], delta: float, accountant: str) -> float:
    """The same for events that are `prepared` and have noise."""
    import numpy as np
    from dp_accounting import rdp

    orders, curve = renyi_orders(), renyi(events)
    if accountant == "rdp_classic":
        return max(0.0, float((curve - math.log(delta) / (np.array(orders) - 1)).min()))
    bound = max(0.0, float(rdp.compute_epsilon(orders, curve, delta)[0]))
    if accountant == "rdp" or bound > LARGEST_PLD_EPSILON or delta < SMALLEST_PLD_DELTA:
        return bound
    # Both are upper bounds at the same delta, so the smaller one is too.
    return min(bound, pld_epsilon(events, delta))


@lru_cache(maxsize=1)
def renyi_orders() -> tuple[float, ...]:
    """Rényi orders: small ones serve large epsilons and the reverse.

    Near its best order the bound is flat: a step of 25 % in (order - 1) costs at most 0.6 % of
    epsilon. So the orders are dense where epsilon is of interest and sparse where an order is
    expensive: the series below 2 converges slowly, and the closed form of a whole order has as
    many terms as the order.
    """
    low = [1 + 0.011 * 1.25**k for k in range(21)]
    large = [float(round(64 * 1.25**k)) for k in range(16)]
    return (*low, *(k / 10 for k in range(20, 80)), *map(float, range(8, 64)), *large)


def renyi(events: tuple[Event, ...]) -> NDArray[np.float64]:
    """Rényi DP of the composition at every order: the sum over all releases (Mironov 2017)."""
    import numpy as np

    total = np.zeros(len(renyi_orders()))
    for event in events:
        search, key = event.selection, event.key
        total += event.count * (renyi_of_search(search) if search else renyi_of_one(*key[:2]))
    return total


@lru_cache(maxsize=64)
def renyi_of_search(search: Selection) -> NDArray[np.float64]:
    """Rényi DP of a private search: its law's bound on the largest curve of a trial."""
    import numpy as np

    trials = [renyi(prepared(Event(*release) for release in kind)) for kind in search.trials]
    return search.law.renyi(np.array(renyi_orders()), np.max(trials, axis=0))


@lru_cache(maxsize=1024)
def renyi_of_one(sample_rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    """Rényi DP of one release at every order (Mironov, Talwar, Zhang 2019), both directions."""
    import dp_accounting
    import numpy as np
    from dp_accounting import rdp

    orders = np.array(renyi_orders())
    accountant = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
    with _quiet():
        accountant.compose(
            dp_accounting.PoissonSampledDpEvent(
                sample_rate, dp_accounting.GaussianDpEvent(noise_multiplier)
            )
        )
    # The classic conversion needs the curve itself, which has no public accessor.
    log_moments = (orders - 1) * np.asarray(accountant._rdp)
    # At fractional orders the library bounds a slowly converging series: some orders come out
    # infinite, some far too large. The log moment is convex in the order and 0 at order 1, so a
    # chord between other orders is an upper bound too.
    for anchors in (np.isfinite(log_moments), orders % 1 == 0):
        chord = np.interp(
            orders,
            np.concatenate(([1.0], orders[anchors])),
            np.concatenate(([0.0], log_moments[anchors])),
            right=np.inf,
        )
        log_moments = np.minimum(log_moments, chord)
    # Rounding could make a tiny moment smaller than it is, even negative: add its own bound.
    log_moments = np.maximum(log_moments, 0.0) + 1e-13 * sample_rate * orders
    curve: NDArray[np.float64] = log_moments / (orders - 1)
    curve.flags.writeable = False
    return curve


def filter_share(events: Iterable[Event], max_epsilon: float, delta: float) -> float:
    """How much of (max_epsilon, delta) is used up, at one Rényi order that only these two choose.

    Above 1 the budget is exceeded. Guarantee: with every release charged before it is made and none
    beyond a share of 1, everything together is (max_epsilon, delta)-DP, also when rates and noises
    are chosen after seeing earlier releases: a Rényi filter at a fixed order (Feldman, Zrnic 2021,
    arXiv:2008.11193). It costs more than `composed_epsilon` of settings that were fixed before.
    """
    best, allowed = _filter_order(max_epsilon, delta)
    ready = prepared(events)
    if _has_no_noise(ready) or allowed <= 0:
        return math.inf if ready else 0.0
    return float(renyi(ready)[best] / allowed)


def filter_epsilon(max_epsilon: float, delta: float, at: float) -> float:
    """Epsilon at delta `at` of everything that a filter for (max_epsilon, delta) has let through.

    The filter bounds one Rényi divergence, which converts to an epsilon at any delta.
    """
    best, _ = _filter_order(max_epsilon, delta)
    return max(0.0, max_epsilon + math.log(delta / at) / (renyi_orders()[best] - 1))


def _filter_order(max_epsilon: float, delta: float) -> tuple[int, float]:
    """Which order a Rényi filter works at, and the divergence that it allows there."""
    import numpy as np

    orders = np.array(renyi_orders())
    # The conversion of Canonne, Kamath, Steinke 2020, solved for the Rényi divergence.
    allowed = (
        max_epsilon - np.log1p(-1 / orders) + (math.log(delta) + np.log(orders)) / (orders - 1)
    )
    best = int(np.argmax(allowed / orders))  # where plain Gaussian releases could go on longest
    return best, float(allowed[best])


@contextmanager
def _quiet() -> Iterator[None]:
    """dp-accounting logs every order that does not converge; those are handled here."""
    logger = logging.getLogger("absl")
    before = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = before


def pld_epsilon(events: tuple[Event, ...], delta: float) -> float:
    """Epsilon of the composed privacy loss distributions, the larger of the two directions."""
    losses = composed_losses(events)
    return math.inf if losses is None else epsilon_of(losses, delta)


@lru_cache(maxsize=2)
def composed_losses(events: tuple[Event, ...]) -> Any:
    """The composed privacy losses of both directions, rounded up; None where none are resolved."""
    import numpy as np

    interval = _interval(events)
    if interval is None:
        return None
    total: Any = None
    # Losses of hundreds of nats under- and overflow to the right limits; NaN is caught below.
    with np.errstate(all="ignore"):
        for event in events:
            sigma, count = _self_composed(event)
            run = _power(_losses_of_one(event.sample_rate, sigma, interval), count)
            total = run if total is None else total.compose(run)
    return total


@lru_cache(maxsize=64)
def _losses_of_one(sample_rate: float, sigma: float, interval: float) -> Any:
    """The privacy losses of one release: more than half of the work, and the same all run long."""
    import dp_accounting
    from dp_accounting.pld import privacy_loss_distribution

    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma,
        value_discretization_interval=interval,
        sampling_prob=sample_rate,
        pessimistic_estimate=True,
        neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
    )


@lru_cache(maxsize=64)
def group_epsilon(events: tuple[Event, ...], records: int, delta: float) -> float:
    """Epsilon of adding or removing so many records at once, for Poisson lots of single records.

    Each of k records is in a lot with probability q by itself; i of them move the sum by at most i
    bounds. So a release is dominated by a mixture of Gaussians at 0, ..., k with the weights of
    Binomial(k, q) against the one at 0, also when releases are chosen adaptively (Choquette-Choo et
    al. 2023, arXiv:2310.15526). The larger of both directions; 0 where nothing was released,
    infinity where losses are not resolved or many events differ (each takes a quarter of a second).
    """
    import numpy as np

    interval = _interval(events) if events else None
    if interval is None or len(events) > _MOST_IN_GROUPS or delta < SMALLEST_PLD_DELTA:
        return math.inf if events else 0.0
    # An eighth of a loss's standard deviation, and few enough points: each is solved for.
    reach = max(records * 8 / s + (records / s) ** 2 / 2 for s, _ in map(_self_composed, events))
    interval = max(8 * records * interval, reach / 1e4)
    truncated = math.log(delta * 1e-4 / sum(event.count for event in events))
    total: Any = None
    with np.errstate(all="ignore"):
        for event in events:
            sigma, count = _self_composed(event)
            one = _losses_of_several(event.sample_rate, sigma, records, interval, truncated)
            run = _power(one, count)
            total = run if total is None else total.compose(run)
    bound = epsilon_of(total, delta)
    return bound if bound <= LARGEST_PLD_EPSILON else math.inf


def _losses_of_several(
    sample_rate: float, sigma: float, records: int, interval: float, truncated: float
) -> Any:
    """The privacy losses of one release for several records."""
    import numpy as np
    from dp_accounting.pld import privacy_loss_distribution
    from scipy.stats import binom

    if sample_rate == 1:  # all of them are in: one longer shift
        return _losses_of_one(1.0, sigma / records, interval)
    counts = np.arange(records + 1)
    weights = binom.pmf(counts, records, sample_rate)
    return privacy_loss_distribution.from_mixture_gaussian_mechanism(
        sigma,
        sensitivities=counts.tolist(),
        sampling_probs=(weights / weights.sum()).tolist(),
        value_discretization_interval=interval,
        log_mass_truncation_bound=truncated,
        pessimistic_estimate=True,
    )


def epsilon_of(losses: Any, delta: float) -> float:
    """Epsilon of composed privacy losses at `delta`."""
    import numpy as np

    with np.errstate(all="ignore"):
        bound = float(losses.get_epsilon_for_delta(delta - FFT_NOISE))
    return math.inf if math.isnan(bound) else max(0.0, bound)


def _self_composed(event: Event) -> tuple[float, int]:
    """Without sampling, n Gaussians are one Gaussian with sigma / sqrt(n): multiplier and count."""
    if event.sample_rate == 1:
        return event.noise_multiplier / math.sqrt(event.count), 1
    return event.noise_multiplier, event.count


def _power(one: Any, count: int) -> Any:
    """`one` composed with itself `count` times.

    In two stages when count is large: the library bounds the support from the length of its input,
    and its bound for a short input and a large count is many times too wide.
    """
    if count < 1000:
        return one.self_compose(count)
    block = math.isqrt(count)
    blocks, rest = divmod(count, block)
    power = one.self_compose(block).self_compose(blocks)
    return power.compose(one.self_compose(rest)) if rest else power


def _interval(events: tuple[Event, ...]) -> float | None:
    """The grid on which losses are rounded: fine against one release, and affordable.

    Rounding adds about interval^2 / 6 to the variance of the loss of each release, so epsilon is
    overstated by roughly (interval / standard deviation of one loss)^2 / 12, relatively. At a 64th
    that is nothing. Any fixed interval would be too coarse for small epsilons or need gigabytes
    for large ones. Coarser is always still an upper bound. None when even the largest loss would
    fall between two points (such releases reveal less than double precision resolves), and where a
    private search is among them, of which the Rényi curve alone is known.
    """
    if any(event.selection is not None for event in events):
        return None
    reach = variance = 0.0
    releases = 0
    for event in events:
        q = event.sample_rate
        sigma, count = _self_composed(event)
        precision = sigma**-2
        # The largest loss on the library's grid, 10 standard deviations out.
        exponent = 10 / sigma + precision / 2
        extra = q * math.expm1(exponent) if exponent < 50 else math.inf
        reach = max(reach, math.log1p(extra) if extra < math.inf else math.log(q) + exponent)
        # Two estimates of the second moment: many small losses, or a few large ones.
        chi_square = q * q * math.expm1(precision) if precision < 50 else math.inf
        variance += count * min(chi_square, q * (precision + precision**2 / 4))
        releases += count
    interval = max(
        min(math.sqrt(variance / releases) / 64, 1e-3),
        # At most about 5e4 points for one release and 4e5 (16 standard deviations) for all.
        reach / 5e4,
        16 * math.sqrt(variance) / 4e5,
        # The library takes second differences of deltas that carry rounding errors near 1e-16;
        # on too fine a grid those errors, all counted as loss, would exceed the loss itself.
        math.sqrt(3e-17 * releases * reach),
    )
    return interval if interval < reach else None


def coarsened(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """At most about _MAX_DISTINCT_EVENTS distinct events that cost no less than `events`.

    A schedule may give every step its own noise, and each distinct event costs a tenth of a
    second. Less noise and a larger rate can only reveal more, so noise is rounded down and rates
    up, each where it takes many values, onto powers of a ratio that is as close to 1 as the limit
    allows. The powers do not depend on the events: later calls of a growing ledger meet the same.
    """
    log_ratio = math.log(1.005)
    many_rates = len({event.sample_rate for event in events}) > 8
    many_noises = len({event.noise_multiplier for event in events}) > 8 or not many_rates
    coarse = events
    while len(coarse) > _MAX_DISTINCT_EVENTS:
        coarse = merge(
            Event(
                _power_above(event.sample_rate, log_ratio) if many_rates else event.sample_rate,
                _power_below(event.noise_multiplier, log_ratio)
                if many_noises
                else event.noise_multiplier,
                event.count,
            )
            for event in events
        )
        log_ratio *= 1.5
    return coarse


def _power_below(value: float, log_ratio: float) -> float:
    return min(value, math.exp(log_ratio * math.floor(math.log(value) / log_ratio)))


def _power_above(value: float, log_ratio: float) -> float:
    return min(1.0, max(value, math.exp(log_ratio * math.ceil(math.log(value) / log_ratio))))
