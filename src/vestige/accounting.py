"""From the ledger's events to epsilon, and from a target epsilon back to noise.

Every release of Vestige is a Poisson-subsampled Gaussian with a known effective multiplier, so one
question is enough: what (epsilon, delta) do these events compose to, when neighbouring datasets
differ by one added or removed record? Three accountants answer it, each with an upper bound:

* ``pld``: composes the privacy loss distributions of both directions (add and remove) numerically,
  on a grid whose rounding can only overstate the loss (Koskela, Jälkö, Honkela 2020,
  arXiv:1906.03049; Gopi, Lee, Wutschitz 2021, arXiv:2106.02848; the discretisation is "connect the
  dots", Doroshenko et al. 2022, arXiv:2207.04380, as implemented by dp-accounting). The tightest.
* ``rdp``: Rényi DP of the sampled Gaussian (Mironov 2017, arXiv:1702.07476; Mironov, Talwar, Zhang
  2019, arXiv:1908.10530) with the conversion of Balle et al. 2020 (arXiv:1905.09982) and
  Canonne, Kamath, Steinke 2020 (arXiv:2004.00010).
* ``rdp_classic``: the same curve with the conversion of Mironov 2017, as printed in the papers.

dp-accounting does the numerics and is imported inside the functions: it takes about a second.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError
from vestige.ledger import Event, merge

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ACCOUNTANTS = ("pld", "rdp", "rdp_classic")

GUARANTEE = "(epsilon, delta)-DP, add/remove one record"
MARGINAL_NOTE = "diagnostic, not a guarantee"

# Below this multiplier the true epsilon exceeds 1e11; infinity is an honest upper bound. Above the
# other, releases are accounted as if they had no more noise than that: squares must not overflow.
_SMALLEST_NOISE = 1e-6
_LARGEST_NOISE = 1e8
# exp(-loss) underflows near a loss of 745: beyond this epsilon the PLD sums lose their precision.
_LARGEST_PLD_EPSILON = 700.0
# Rounding of the FFT moves a delta by less than 1e-13 (measured up to 1e8 releases). It is taken
# off the delta that is asked for, and deltas it could matter for are left to RDP.
_FFT_NOISE = 1e-12
_SMALLEST_PLD_DELTA = 100 * _FFT_NOISE
# More distinct events than this are rounded pessimistically onto a common grid first.
_MAX_DISTINCT_EVENTS = 64

# Calibration: searched range of the accounted multiplier, and relative width of the answer.
_NOISE_RANGE = (1e-3, 1e6)
_NOISE_TOLERANCE = 1e-4
# The target is undercut by this fraction, so that a caller who recomputes the multiplier with
# another order of floating-point operations still stays below it.
_TARGET_MARGIN = 1e-6


@dataclass(frozen=True)
class Calibration:
    """Noise that reaches a target, and the epsilon that it reaches under the same accountant.

    `noise_multiplier` is the joint multiplier that `make_private` takes. Beta is not folded into
    it: the releases are accounted at noise_multiplier / beta.
    """

    noise_multiplier: float
    epsilon: float
    target_epsilon: float
    delta: float
    sample_rate: float
    steps: int
    accountant: str
    beta: float


def accountant_name(name: str) -> str:
    """The accountant that answers for `name`: one of ACCOUNTANTS; "prv" is answered by "pld"."""
    if name == "prv":
        return "pld"
    if name not in ACCOUNTANTS:
        raise ConfigError(
            f"accountant {name!r} is unknown: choose one of {', '.join(ACCOUNTANTS)} "
            "(prv is accepted and answered by pld)"
        )
    return name


def epsilon(events: Sequence[Event], delta: float, accountant: str = "pld") -> float:
    """An upper bound on epsilon at `delta` for the composition of `events`.

    Guarantee: the composition is (epsilon, delta)-DP for adding or removing one record, also when
    each release is chosen adaptively from the earlier ones, as long as the multipliers and rates
    themselves were fixed in advance. Never negative and never NaN; 0.0 without events; infinity as
    soon as one release had no noise.

    "pld" is tight to better than 1e-3 in ordinary settings and never above "rdp": where its grid
    cannot resolve the losses (hundreds of millions of releases, a delta below 1e-10, an epsilon
    beyond 700) the Rényi bound is the better answer and is returned.

    Answers are cached by the merged events, so asking twice costs nothing.
    """
    name = accountant_name(accountant)
    delta = _check_delta(delta)
    # Infinite noise reveals nothing. One release without noise reveals everything.
    merged = merge(
        Event(event.sample_rate, min(event.noise_multiplier, _LARGEST_NOISE), event.count)
        for event in events
        if event.noise_multiplier < math.inf
    )
    if not merged:
        return 0.0
    if any(event.noise_multiplier < _SMALLEST_NOISE for event in merged):
        return math.inf
    return _cached_epsilon(_coarsened(merged), delta, name)


def joint_multiplier(group_noise_multipliers: Sequence[float]) -> float:
    """The multiplier of releasing all groups at once: 1 / sqrt(sum sigma_g^-2).

    One record may reach the clipping norm of every group in the same step, and the groups share
    one Poisson draw, so the joint release is exactly one subsampled Gaussian with this multiplier
    (the norm of the whitened difference is sqrt(sum sigma_g^-2)). Zero if any group has no noise.
    """
    sigmas = [Event(1.0, sigma).noise_multiplier for sigma in group_noise_multipliers]
    if not sigmas:
        raise ConfigError("group_noise_multipliers is empty: give one multiplier per group")
    smallest = min(sigmas)
    if smallest == 0 or smallest == math.inf:
        return smallest
    # Relative to the smallest, so that no square over- or underflows.
    return smallest / math.sqrt(math.fsum((smallest / sigma) ** 2 for sigma in sigmas))


def calibrate(
    target_epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "pld",
    beta: float = 1.0,
) -> Calibration:
    """The smallest noise whose epsilon stays within `target_epsilon` after `steps` releases.

    Guarantee: `epsilon` at the returned noise_multiplier / beta, under the same accountant, was
    evaluated and is at most `target_epsilon`. The noise is within 0.1 % of the smallest such
    value under that accountant (targets so large that an accounted multiplier of 0.001 suffices
    get that). Beta is never folded into the returned multiplier.
    """
    name = accountant_name(accountant)
    target = _check_positive(target_epsilon, "target_epsilon", "give a finite epsilon above 0")
    delta = _check_delta(delta)
    beta = _check_beta(beta)
    rate = Event(sample_rate, 1.0, steps).sample_rate

    def spent(noise: float) -> float:
        return epsilon([Event(rate, noise / beta, steps)], delta, name)

    def spent_by_rdp(noise: float) -> float:
        return epsilon([Event(rate, noise / beta, steps)], delta, "rdp")

    start = beta
    if name == "pld":
        # The Rényi curve is cheap at any noise and close: a rough answer starts the search well.
        rough = _search(spent_by_rdp, target, start, beta, tolerance=0.1)
        start = start if rough is None else rough
    noise = _search(spent, target, start, beta, tolerance=_NOISE_TOLERANCE)
    if noise is None:
        floor = spent(_NOISE_RANGE[1] * beta)
        raise ConfigError(
            f"target_epsilon {target} cannot be reached with a noise multiplier up to "
            f"{_NOISE_RANGE[1]:g} (epsilon {floor:.3g} there, accountant {name}): raise epsilon or "
            "delta, lower the sampling rate or the number of steps, or use accountant pld"
        )
    return Calibration(noise, spent(noise), target, delta, rate, steps, name, beta)


def budget(
    sample_rate: float,
    steps: int,
    delta: float,
    noise_multiplier: float | None = None,
    beta: float = 1.0,
    group_noise_multiplier: float | None = None,
    groups: int = 1,
) -> dict[str, Any]:
    """What `vestige budget` prints: epsilon of `steps` releases under every accountant.

    Either `noise_multiplier` (joint) or `group_noise_multiplier` with `groups` (the papers' form:
    each group has its own noise, joint multiplier S_g / sqrt(groups)) is given. Accounted at
    sigma_eff = joint / beta.

    Guarantee: "epsilon" holds upper bounds for the joint release (null, and guarantee "none", when
    infinite). "marginal_epsilon" is what one group alone would cost: the figure of the papers, a
    diagnostic, since a reader of the model sees all groups.
    """
    delta = _check_delta(delta)
    beta = _check_beta(beta)
    groups = _check_groups(groups)
    if (noise_multiplier is None) == (group_noise_multiplier is None):
        given = "neither" if noise_multiplier is None else "both"
        raise ConfigError(
            f"{given} of noise_multiplier and group_noise_multiplier given: give exactly one, the "
            "joint multiplier or the multiplier inside each group"
        )
    if noise_multiplier is not None:
        if groups > 1:
            raise ConfigError(
                f"groups {groups} needs group_noise_multiplier: a joint noise_multiplier already "
                "covers all groups, so leave groups out or give the multiplier of each group"
            )
        joint = _check_noise(noise_multiplier, "noise_multiplier")
    else:
        group_noise_multiplier = _check_noise(group_noise_multiplier, "group_noise_multiplier")
        joint = group_noise_multiplier / math.sqrt(groups)

    def costs(sigma: float) -> dict[str, float | None]:
        event = Event(sample_rate, sigma, steps)
        return {name: _finite(epsilon([event], delta, name)) for name in ACCOUNTANTS}

    costs_of_all = costs(joint / beta)
    report: dict[str, Any] = {
        "sigma_eff": joint / beta,
        "noise_multiplier": joint,
        "group_noise_multiplier": group_noise_multiplier,
        "groups": groups,
        "beta": beta,
        "sample_rate": float(sample_rate),
        "steps": steps,
        "delta": delta,
        "epsilon": costs_of_all,
        "guarantee": "none" if None in costs_of_all.values() else GUARANTEE,
        "marginal_epsilon": None,
    }
    if group_noise_multiplier is not None and groups > 1:
        report["marginal_epsilon"] = costs(group_noise_multiplier / beta)
        report["marginal_note"] = MARGINAL_NOTE
    return report


def calibration_report(
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    beta: float = 1.0,
    groups: int = 1,
    accountant: str = "pld",
) -> dict[str, Any]:
    """What `vestige calibrate` prints: noise for a target, jointly and per group.

    Guarantee: that of `calibrate`. "group_noise_multiplier" is the equal multiplier of `groups`
    groups whose joint multiplier is "noise_multiplier", that is joint * sqrt(groups).
    """
    groups = _check_groups(groups)
    found = calibrate(epsilon, delta, sample_rate, steps, accountant, beta)
    return {
        "noise_multiplier": found.noise_multiplier,
        "group_noise_multiplier": found.noise_multiplier * math.sqrt(groups),
        "sigma_eff": found.noise_multiplier / found.beta,
        "epsilon": found.epsilon,
        "target_epsilon": found.target_epsilon,
        "delta": found.delta,
        "sample_rate": found.sample_rate,
        "steps": found.steps,
        "beta": found.beta,
        "groups": groups,
        "accountant": found.accountant,
    }


@lru_cache(maxsize=4096)
def _cached_epsilon(events: tuple[Event, ...], delta: float, accountant: str) -> float:
    if accountant == "rdp_classic":
        return _classic_epsilon(events, delta)
    bound = _rdp_epsilon(events, delta)
    if accountant == "rdp" or bound > _LARGEST_PLD_EPSILON or delta < _SMALLEST_PLD_DELTA:
        return bound
    # Both are upper bounds at the same delta, so the smaller one is too.
    return min(bound, _pld_epsilon(events, delta))


@lru_cache(maxsize=1)
def _orders() -> tuple[float, ...]:
    """Rényi orders: small ones serve large epsilons and the reverse.

    Near its best order the bound is flat: a step of 25 % in (order - 1) costs at most 0.6 % of
    epsilon. So the orders are dense where epsilon is of interest and sparse where an order is
    expensive: the series below 2 converges slowly, and the closed form of a whole order has as
    many terms as the order.
    """
    low = [1 + 0.011 * 1.25**k for k in range(21)]
    large = [float(round(64 * 1.25**k)) for k in range(16)]
    return (*low, *(k / 10 for k in range(20, 80)), *map(float, range(8, 64)), *large)


def _rdp(events: tuple[Event, ...]) -> NDArray[np.float64]:
    """Rényi DP of the composition at every order: the sum over all releases (Mironov 2017)."""
    import numpy as np

    total = np.zeros(len(_orders()))
    for event in events:
        total += event.count * _rdp_of_one(event.sample_rate, event.noise_multiplier)
    return total


@lru_cache(maxsize=1024)
def _rdp_of_one(sample_rate: float, noise_multiplier: float) -> NDArray[np.float64]:
    """Rényi DP of one release at every order (Mironov, Talwar, Zhang 2019), both directions."""
    import dp_accounting
    import numpy as np
    from dp_accounting import rdp

    orders = np.array(_orders())
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


def _rdp_epsilon(events: tuple[Event, ...], delta: float) -> float:
    from dp_accounting import rdp

    bound, _ = rdp.compute_epsilon(_orders(), _rdp(events), delta)
    return max(0.0, float(bound))


def _classic_epsilon(events: tuple[Event, ...], delta: float) -> float:
    import numpy as np

    bounds = _rdp(events) - math.log(delta) / (np.array(_orders()) - 1)
    return max(0.0, float(bounds.min()))


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


def _pld_epsilon(events: tuple[Event, ...], delta: float) -> float:
    """Epsilon of the composed privacy loss distributions, the larger of the two directions."""
    import dp_accounting
    import numpy as np
    from dp_accounting.pld import privacy_loss_distribution

    interval = _interval(events)
    if interval is None:
        return math.inf
    total = None
    # Losses of hundreds of nats under- and overflow to the right limits; NaN is caught below.
    with np.errstate(all="ignore"):
        for event in events:
            sigma, count = _self_composed(event)
            one = privacy_loss_distribution.from_gaussian_mechanism(
                sigma,
                value_discretization_interval=interval,
                sampling_prob=event.sample_rate,
                pessimistic_estimate=True,
                neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE,
            )
            run = _power(one, count)
            total = run if total is None else total.compose(run)
        assert total is not None
        bound = float(total.get_epsilon_for_delta(delta - _FFT_NOISE))
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
    fall between two points: such releases reveal less than double precision resolves.
    """
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


def _coarsened(events: tuple[Event, ...]) -> tuple[Event, ...]:
    """At most about _MAX_DISTINCT_EVENTS distinct events that cost no less than `events`.

    A schedule may give every step its own noise, and each distinct event costs a tenth of a
    second. Less noise and a larger rate can only reveal more, so noise is rounded down and, where
    rates vary too, rates up, onto powers of a ratio that is as close to 1 as the limit allows.
    The powers do not depend on the events: later calls of a growing ledger meet the same ones.
    """
    log_ratio = math.log(1.005)
    many_rates = len({event.sample_rate for event in events}) > 8
    coarse = events
    while len(coarse) > _MAX_DISTINCT_EVENTS:
        coarse = merge(
            Event(
                _power_above(event.sample_rate, log_ratio) if many_rates else event.sample_rate,
                _power_below(event.noise_multiplier, log_ratio),
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


def _search(
    spent: Callable[[float], float], target: float, start: float, beta: float, tolerance: float
) -> float | None:
    """The smallest noise with spent(noise) <= target, to `tolerance`; None when out of range.

    Epsilon falls with noise almost as a power, so the search runs on logarithms of both.
    """
    from scipy.optimize import brentq

    lowest, highest = (math.log(bound * beta) for bound in _NOISE_RANGE)
    allowed = target * (1 - _TARGET_MARGIN)

    def excess(log_noise: float) -> float:
        ratio = spent(math.exp(log_noise)) / allowed
        # Bounded, so that epsilons of 0 and infinity do not derail the interpolation.
        return math.log(min(max(ratio, 1e-9), 1e9))

    def toward(point: float, value: float) -> float:
        # Epsilon is near 1/noise, so this step about reaches the target; then a bit further.
        step = min(max(abs(value), tolerance), 2.0) * 1.2
        return min(max(point + math.copysign(step, value), lowest), highest)

    low = high = math.log(start)
    low_value = high_value = excess(low)
    while high_value > 0:
        if high == highest:
            return None
        low, low_value = high, high_value
        high = toward(high, high_value)
        high_value = excess(high)
    while low_value <= 0:
        if low == lowest:
            return math.exp(low)
        high, high_value = low, low_value
        low = toward(low, min(low_value, -tolerance))
        low_value = excess(low)

    root = brentq(excess, low, high, xtol=tolerance, disp=False)
    # The root is within the tolerance of the crossing: return a point that was seen to be below.
    point = root
    while excess(point) > 0:
        point = min(point + tolerance, high)
    return math.exp(point)


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def _check_delta(delta: float) -> float:
    if isinstance(delta, bool | str) or not 0 < delta < 1:
        raise ConfigError(
            f"delta {delta!r} is not strictly between 0 and 1: "
            "give the probability that may escape the bound, well below 1 / dataset size"
        )
    return float(delta)


def _check_positive(value: float, name: str, remedy: str) -> float:
    if isinstance(value, bool | str) or not 0 < value < math.inf:
        raise ConfigError(f"{name} {value!r} is not a finite number above 0: {remedy}")
    return float(value)


def _check_noise(value: float | None, name: str) -> float:
    if value is None or isinstance(value, bool | str) or not 0 <= value < math.inf:
        raise ConfigError(
            f"{name} {value!r} is not a finite number >= 0: give the noise standard deviation "
            "divided by the sensitivity (0 means no privacy)"
        )
    return float(value)


def _check_beta(beta: float) -> float:
    if isinstance(beta, bool | str) or not 0 < beta <= 1:
        raise ConfigError(
            f"beta {beta!r} is not in (0, 1]: give the share of the new clipped sum in the release "
            "(1 is plain DP-SGD)"
        )
    return float(beta)


def _check_groups(groups: int) -> int:
    if isinstance(groups, bool) or not isinstance(groups, int) or groups < 1:
        raise ConfigError(
            f"groups {groups!r} is not a whole number >= 1: give the number of clipping groups"
        )
    return groups
