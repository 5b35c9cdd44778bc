"""What the events of a run amount to beyond one number: curves, mu, and groups of records.

* epsilon(delta), by the accountant that makes the claim.
* The trade-off curve (Dong, Roth, Su 2022, arXiv 1905.02383): whoever tests whether a record was
  used, with false alarms alpha, misses at least
  max(0, 1 - delta - e^epsilon alpha, e^-epsilon (1 - delta - alpha)), whatever (epsilon, delta) of
  the curve; the largest of these is the bound.
* mu of Gaussian DP: the mu with delta_mu(epsilon) = delta at one point of the curve (Balle, Wang
  2018, arXiv 1805.06530, for delta_mu). A run is not exactly mu-GDP, so this is an approximation.
* k records at once: (k epsilon, delta (e^(k epsilon) - 1) / (e^epsilon - 1)), the best that any
  point of the Rényi curve gives at the claimed delta (after Vadhan 2017, lemma 2.2). For plain
  Poisson Gaussian releases also the composed mixtures of Gaussians (`composition.group_epsilon`),
  which are much smaller.

Guarantee: every epsilon is an upper bound, every bound on misses a lower one; mu is neither.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from vestige.privacy import accounting, composition
from vestige.privacy.events import Event

Point = tuple[float, float]  # (delta, epsilon)
Limit = tuple[float, float] | None  # (max_epsilon, delta) of a Rényi filter that makes the claim

DELTAS = (*(float(f"{m}e-{k}") for k in range(10, 2, -1) for m in (1, 3)), 1e-2)
FALSE_ALARMS = (0.0001, 0.001, 0.01, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
GROUP_SIZES = (2, 3, 5, 10)
_NOTHING_LEFT = 100.0  # an epsilon that protects nobody
# Larger deltas shape the trade-off curve at ordinary error rates; nobody would claim them.
_LARGE = tuple(0.015 * (0.5 / 0.015) ** (k / 31) for k in range(32))
_NEAR_ONE = tuple(1 - 0.45 * (1e-4 / 0.45) ** (k / 31) for k in range(32))
_EPSILONS = 129  # of the same curve, where epsilon is given and delta is read


def epsilons(events: Sequence[Event], deltas: Sequence[float], accountant: str) -> list[float]:
    """`accounting.epsilon` at each of `deltas`; the losses are composed once and kept."""
    events = composition.prepared(events)
    return [accounting.epsilon(events, delta, accountant) for delta in deltas]


def epsilon_curve(
    events: Sequence[Event], delta: float, accountant: str, limit: Limit = None
) -> list[Point]:
    """(delta, epsilon) over the table of deltas and the claimed one, in order."""
    deltas = sorted({*DELTAS, delta})
    if limit is not None:
        return [(each, composition.filter_epsilon(*limit, each)) for each in deltas]
    return list(zip(deltas, epsilons(events, deltas, accountant), strict=True))


def trade_off(
    events: Sequence[Event],
    accountant: str,
    curve: Sequence[Point],
    limit: Limit = None,
    alarms: Sequence[float] = FALSE_ALARMS,
) -> list[Point]:
    """(false alarms, misses at least) of any test for one record; empty without a guarantee."""
    finite = [(delta, epsilon) for delta, epsilon in curve if epsilon < math.inf]
    if not finite:
        return []
    if limit is None:
        finite += _more_points(
            composition.prepared(events), accountant, max(epsilon for _, epsilon in finite)
        )
    return [(alpha, max(misses(alpha, *point) for point in finite)) for alpha in alarms]


def _more_points(events: tuple[Event, ...], accountant: str, largest: float) -> list[Point]:
    """Points of the same curve at deltas that nobody would claim, down to epsilon 0."""
    losses = None
    if accountant == "pld" and 0 < largest <= composition.LARGEST_PLD_EPSILON:
        losses = composition.composed_losses(events)
    if losses is None:
        deltas = (*_LARGE, *_NEAR_ONE)
        more = list(zip(deltas, epsilons(events, deltas, accountant), strict=True))
        return [(delta, epsilon) for delta, epsilon in more if epsilon < math.inf]
    import numpy as np

    # Reading many deltas at once is cheap; each epsilon for a delta is a pass over all losses.
    wanted = [largest * k / (_EPSILONS - 1) for k in range(_EPSILONS)]
    with np.errstate(all="ignore"):
        read = np.asarray(losses.get_delta_for_epsilon(wanted)) + composition.FFT_NOISE
    return [(float(d), e) for d, e in zip(read, wanted, strict=True) if 0 < d < 1]


def misses(alpha: float, delta: float, epsilon: float) -> float:
    """The fewest misses that (epsilon, delta)-DP allows a test with false alarms `alpha`."""
    # e^epsilon alone would overflow near 709.
    steep = 1 - delta - (math.exp(min(epsilon, 700.0)) * alpha)
    return max(0.0, steep, math.exp(-epsilon) * (1 - delta - alpha))


def gaussian_delta(mu: float, epsilon: float) -> float:
    """delta of the Gaussian mechanism with sensitivity mu and noise 1, at `epsilon`."""
    from scipy.special import log_ndtr

    if mu == 0:
        return 0.0
    far = epsilon + float(log_ndtr(-epsilon / mu - mu / 2))
    return max(0.0, math.exp(float(log_ndtr(mu / 2 - epsilon / mu))) - math.exp(far))


def gaussian_mu(delta: float, epsilon: float) -> float:
    """The mu whose Gaussian mechanism has exactly this delta at this epsilon."""
    low, high = 0.0, 1.0
    while gaussian_delta(high, epsilon) < delta:
        low, high = high, 2 * high
    for _ in range(60):
        middle = (low + high) / 2
        if gaussian_delta(middle, epsilon) < delta:
            low = middle
        else:
            high = middle
    return high


def of_several_records(
    events: Sequence[Event], delta: float, limit: Limit = None, plain: bool = False
) -> dict[int, float]:
    """Epsilon at `delta` for several records at once; infinity where the Rényi curve has none.

    `plain` says that every event is one Gaussian release of a Poisson lot.
    """
    events = composition.prepared(events)

    def one_record(at: float) -> float:
        if limit is not None:
            return composition.filter_epsilon(*limit, at)
        return accounting.epsilon(events, at, "rdp")

    best = dict.fromkeys(GROUP_SIZES, math.inf)
    for quarter in range(240):
        smaller = delta * 10 ** (-quarter / 4)
        one = one_record(smaller) if smaller > 1e-300 else math.inf
        if one == math.inf:
            break
        for records, bound in best.items():
            if math.log(smaller) + _log_growth(one, records) <= math.log(delta):
                best[records] = min(bound, records * one)
    if plain and limit is None and one_record(delta) < math.inf:
        for records, bound in best.items():
            best[records] = min(bound, composition.group_epsilon(events, records, delta))
            if best[records] > _NOTHING_LEFT:
                break  # larger groups take longer, and would not say more
    return best


def _log_growth(epsilon: float, records: int) -> float:
    """log of (e^(k epsilon) - 1) / (e^epsilon - 1), which is k at epsilon 0."""
    if epsilon < 1e-9:
        return math.log(records) + (records - 1) * epsilon
    whole = records * epsilon
    return whole - epsilon + math.log(-math.expm1(-whole)) - math.log(-math.expm1(-epsilon))
