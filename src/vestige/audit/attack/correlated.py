"""Reading releases whose noise is correlated from lot to lot.

The covariance S of the noise of different lots is public (mixing.py). A canary in the lots of a 0/1
vector s moves its readings by mu * s, so the best statistic of readings y is

    s' K y / sqrt(s' K s),   K = S^-1,   with mean mu * sqrt(s' K s) if it is in, and variance 1.

A family trial is about the stretch of lots that one charge covers (a cycle, a tree, a block).
The statistics of one canary in two stretches are independent if s' K s* = 0, as for banded noise;
where that does not hold, the first stretch alone is used. docs/audit.md has the rest.
"""

from __future__ import annotations

import numpy as np

from vestige.audit.attack.canaries import Canaries, standardised
from vestige.audit.attack.training import Attacked, inclusion
from vestige.audit.bounds import Array, Flags, Numbers
from vestige.audit.mixing import Mixing
from vestige.audit.options import AuditOptions

_INDEPENDENT = 1e-9

FamilyTrials = tuple[Array, Flags, Numbers]
"""Score, inclusion and number of the canary of each family trial."""


def correlated_scores(
    options: AuditOptions, attacked: Attacked, canaries: Canaries, noise: float
) -> tuple[Array, FamilyTrials]:
    """The membership scores of all canaries, and the family trials."""
    correlation, plan = attacked.engine.door.correlation, attacked.engine.plan
    assert correlation is not None
    lots, every = [look.lot for look in attacked.recording.sums], correlation.every
    mixing = Mixing(options.chosen.tabulated(options.length), plan, max(lots) + 1)
    inverse = np.asarray(np.linalg.inv(mixing.covariance[np.ix_(lots, lots)]), dtype=np.float64)
    read, mu = standardised(attacked, canaries.count, noise)
    drawn = inclusion(attacked.lots, canaries.count)
    if canaries.zeroed:
        signal = drawn.astype(float)
        square = mu**2 * (signal * (inverse @ signal)).sum(axis=0)
        membership = mu * (signal * (inverse @ read)).sum(axis=0) - square / 2
    else:
        turns = correlation.period
        membership = _over_places(inverse, read, mu, turns, min(1.0, turns * plan.rate_of(0)))
    inside = drawn & canaries.member
    signals = stretch_signals(drawn, every, correlation.period)
    return membership, _family(inverse, read, mu, inside, signals, every)


def _family(
    inverse: Array, read: Array, mu: float, inside: Flags, signals: Array, every: int
) -> FamilyTrials:
    """One trial for each canary and stretch, or for the first stretch alone."""
    weighted = inverse @ signals
    if _overlap(weighted, signals) > _INDEPENDENT:
        signals, weighted = signals[:1], weighted[:1]
    family, labels, numbers = [], [], []
    for k, (signal, weight) in enumerate(zip(signals, weighted, strict=True)):
        elsewhere = inside.copy()
        elsewhere[k * every : (k + 1) * every] = False
        norm: Array = (weight * signal).sum(axis=0)
        used: Flags = np.asarray(norm > 0)  # a place may come after the end of the run
        score = (weight * (read - mu * elsewhere)).sum(axis=0)[used] / np.sqrt(norm[used])
        family.append(score)
        present: Flags = np.asarray(inside[k * every : (k + 1) * every].any(axis=0))
        labels.append(present[used])
        numbers.append(np.flatnonzero(used))
    return np.concatenate(family), np.concatenate(labels), np.concatenate(numbers)


def stretch_signals(drawn: Flags, every: int, period: int) -> Array:
    """(stretches, steps, canaries): the lots that a canary's trial of each stretch is about.

    Those that drew it; for a canary that none drew, every `period`-th from some lot on.
    """
    steps, count = drawn.shape
    stretches = -(-steps // every)
    padded = np.zeros((stretches * every, count), dtype=np.bool_)
    padded[:steps] = drawn
    by_stretch = padded.reshape(stretches, every, count)
    present: Flags = np.asarray(by_stretch.any(axis=1))
    place = by_stretch[present.argmax(axis=0), :, np.arange(count)].T  # of the first that has it
    never = np.flatnonzero(~present.any(axis=0))
    turns = min(period, every, steps)
    place[:, never] = np.arange(every)[:, None] % turns == never % turns
    wanted = np.where(present[:, None, :], by_stretch, place)
    signals = np.zeros((stretches, stretches * every, count))
    for k in range(stretches):
        signals[k, k * every : (k + 1) * every] = wanted[k]
    return signals[:, :steps]


def _overlap(weighted: Array, signals: Array) -> float:
    """The largest correlation of one canary's statistics in two stretches."""
    products = np.einsum("jtc,ktc->cjk", weighted, signals)
    norms = np.sqrt(np.maximum(np.einsum("cjj->cj", products), 1e-300))
    products /= norms[:, :, None] * norms[:, None, :]
    products[:, range(len(signals)), range(len(signals))] = 0
    return float(np.abs(products).max())


def _over_places(inverse: Array, read: Array, mu: float, every: int, rate: float) -> Array:
    """The log-likelihood ratio of a record whose place in each cycle is unknown."""
    exponent = mu * (inverse @ read) - mu**2 * np.diag(inverse)[:, None] / 2
    with np.errstate(divide="ignore"):
        each = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    places = [each[place::every].sum(axis=0) for place in range(min(every, len(each)))]
    ratio: Array = np.logaddexp.reduce(np.array(places), axis=0)
    return ratio
