"""From the error rates of an attack to lower bounds on epsilon, with a stated confidence.

Three bounds, each at confidence 1 - alpha on its own:

    membership   (epsilon, delta)-DP makes TPR <= e^epsilon FPR + delta for every test, and
                 TNR <= e^epsilon FNR + delta. So epsilon >= log((TPR - delta) / FPR), with the
                 lower end of TPR and the upper end of FPR by Clopper and Pearson, alpha/2 each.
    family       if the release is s + b * shift + N(0, I) with b = 0 or 1, no test has
                 quantile(1 - FPR) + quantile(1 - FNR) above mu = shift = 1/sigma. With upper ends
                 of FPR and FNR at alpha/2 each this is a lower end of mu, so sigma <= 1/mu: the
                 largest multiplier that the observed error rates still allow. The epsilon of the
                 whole run at that multiplier is the bound (`family_events`).
    one run      m canaries are in the data with probability 1/2 each, by independent coins. From
                 what was released the auditor guesses r of the coins and abstains on the others.
                 Under (epsilon, delta)-DP, with W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),
                     P[v or more correct] <= P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i
                 over 0 < i <= v, which grows with epsilon: every epsilon at which it is at most
                 alpha is refuted. r must not depend on the coins; the guesses may on each other.

The threshold of the first two, and for membership the direction of the test, are chosen on one half
of the trials and judged on the other, so nothing is paid for the choice.

Why heterogeneous trials do no harm: the rates of the counts may differ from trial to trial (records
of a fixed order come at better and worse places). If every trial's error probability is at least
p, the number of errors is stochastically larger than a binomial's at p, so its upper end misses p
with probability alpha/2 at most; p is the smallest error rate that the claim allows.

Papers: Clopper and Pearson 1934; Kairouz, Oh, Viswanath 2015, arXiv 1311.0776 (error rates and
DP); Dong, Roth, Su 2022, arXiv 1905.02383 (the trade-off curve of a Gaussian); Nasr et al. 2023,
arXiv 2302.07956 (auditing through the family); Steinke, Nasr, Jagielski 2023, arXiv 2305.08846
(one run: Theorem 5.2 and Appendix D).
Guarantee: each bound exceeds the true epsilon with probability at most alpha; the first two for
independent trials, the family bound if the mechanism belongs to the family.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.special import ndtr, ndtri
from scipy.stats import beta, binom

from vestige.errors import ConfigError
from vestige.privacy.accounting import Charge
from vestige.privacy.ledger import Event

Scores = npt.NDArray[np.float64]
Labels = npt.NDArray[np.bool_]

_CANDIDATES = 100  # thresholds that are tried on the first half
# They are compared at a tenth of alpha: the best of many bounds is often a lucky one in the tails.
_CAUTION = 0.1
_LARGEST = 60.0  # an epsilon beyond which no number of guesses could tell


def clopper_pearson(errors: Any, trials: Any, alpha: float) -> tuple[Any, Any]:
    """The lower and upper ends of a rate: each is wrong with probability at most `alpha`."""
    k, n = np.asarray(errors, dtype=float), np.asarray(trials, dtype=float)
    with np.errstate(all="ignore"):
        lower = np.where(k > 0, beta.ppf(alpha, k, n - k + 1), 0.0)
        upper = np.where(k < n, beta.ppf(1 - alpha, k + 1, n - k), 1.0)
    return lower, upper


@dataclass(frozen=True)
class Split:
    """Which trials choose the threshold (True) and which are judged by it."""

    choosing: Labels

    @classmethod
    def by_canary(cls, canaries: npt.NDArray[np.int64], count: int) -> Split:
        """The first half of `count` canaries chooses; all trials of a canary go together."""
        return cls(canaries < count // 2)


@dataclass(frozen=True)
class Cut:
    """A threshold test on the second half, with the ends of its error rates."""

    threshold: float
    says_in: bool  # which verdict counts as a hit: "in" above the threshold, or "out" below it
    hits: int
    false_alarms: int
    hit_trials: int
    alarm_trials: int


def membership_epsilon(
    scores: Scores, labels: Labels, split: Split, delta: float, confidence: float
) -> tuple[float, Cut]:
    """A lower bound on epsilon from a test of membership: labels say who was in the data."""
    alpha = (1 - confidence) / 2

    def bound(cut: _Counts, says_in: bool, alpha: float) -> Any:
        if says_in:
            hits, n, alarms, m = cut.above_in, cut.ins, cut.above_out, cut.outs
        else:
            hits, n, alarms, m = cut.outs - cut.above_out, cut.outs, cut.ins - cut.above_in, cut.ins
        hit = clopper_pearson(hits, n, alpha)[0] - delta
        alarm = clopper_pearson(alarms, m, alpha)[1]
        with np.errstate(all="ignore"):
            return np.where(hit > 0, np.log(np.maximum(hit, 1e-300) / alarm), -np.inf)

    thresholds, counts = _first_half(scores, labels, split)
    bounds = [np.asarray(bound(counts, says_in, _CAUTION * alpha)) for says_in in (True, False)]
    says_in = bool(bounds[0].max() >= bounds[1].max())
    chosen = thresholds[int(bounds[0 if says_in else 1].argmax())]
    judged = _count(scores[~split.choosing], labels[~split.choosing], np.array([chosen]))
    value = float(bound(judged, says_in, alpha)[0])
    above_in, above_out = int(judged.above_in[0]), int(judged.above_out[0])
    cut = Cut(
        float(chosen),
        says_in,
        above_in if says_in else judged.outs - above_out,
        above_out if says_in else judged.ins - above_in,
        judged.ins if says_in else judged.outs,
        judged.outs if says_in else judged.ins,
    )
    return max(0.0, value), cut


def shift_lower(scores: Scores, labels: Labels, split: Split, confidence: float) -> float:
    """A lower end of mu where scores are N(0, 1) without and N(mu, 1) with the canary; or 0.

    The scale of the scores does not matter: only the order of a score and the threshold does. The
    threshold is the one that would be best for two normals with the first half's means and spread,
    which is steadier than the best of its counts.
    """
    alpha = (1 - confidence) / 2
    first, kinds = scores[split.choosing], labels[split.choosing]
    ins, outs = first[kinds], first[~kinds]
    _check_kinds(len(ins), len(outs))
    spread = math.sqrt((ins.var() * len(ins) + outs.var() * len(outs)) / len(first)) or 1.0
    low, high = outs.mean(), ins.mean()
    thresholds = np.linspace(min(low, high) - 3 * spread, max(low, high) + 3 * spread, 200)
    expected = _Counts(
        len(ins) * ndtr((high - thresholds) / spread),
        len(outs) * ndtr((low - thresholds) / spread),
        len(ins),
        len(outs),
    )
    chosen = thresholds[int(np.asarray(_shift(expected, alpha)).argmax())]
    judged = _count(scores[~split.choosing], labels[~split.choosing], np.array([chosen]))
    return max(0.0, float(_shift(judged, alpha)[0]))


def shift_of(false_positives: Any, false_negatives: Any) -> Any:
    """mu of the Gaussian trade-off curve through a pair of error rates."""
    return -ndtri(false_positives) - ndtri(false_negatives)


def family_events(
    charges: Mapping[Charge, int], noise: float, attacked: float, allowed: float
) -> tuple[Event, ...]:
    """The run's events if its multipliers were `allowed` / `attacked` times the planned ones.

    `charges` at `noise` are the plan; `attacked` is the planned multiplier of the events that were
    attacked, `allowed` the largest one that the error rates allow. What is charged beside the sums
    (counts, a normaliser) was not attacked and is left out, which makes the bound smaller.
    """
    if not math.isfinite(allowed):
        return ()
    return tuple(
        Event(charge.sample_rate, noise / charge.weight * allowed / attacked, count)
        for charge, count in charges.items()
        if charge.weight
    )


@dataclass(frozen=True)
class _Counts:
    """How many trials of each kind score, or are expected, above each threshold."""

    above_in: npt.NDArray[Any]
    above_out: npt.NDArray[Any]
    ins: int
    outs: int


def _count(scores: Scores, labels: Labels, thresholds: Scores) -> _Counts:
    inside, outside = np.sort(scores[labels]), np.sort(scores[~labels])
    _check_kinds(len(inside), len(outside))
    return _Counts(
        len(inside) - np.searchsorted(inside, thresholds, side="right"),
        len(outside) - np.searchsorted(outside, thresholds, side="right"),
        len(inside),
        len(outside),
    )


def _check_kinds(ins: int, outs: int) -> None:
    if not ins or not outs:
        raise ConfigError(
            f"of {ins + outs} trials in a half {ins} have their canary in: both kinds are needed. "
            "Use more trials, or a sampling rate further from 0 and 1."
        )


def _first_half(scores: Scores, labels: Labels, split: Split) -> tuple[Scores, _Counts]:
    scores, labels = scores[split.choosing], labels[split.choosing]
    # Both kinds' own quantiles: where few canaries are in, most scores say nothing about them.
    ranks = np.linspace(0, 1, _CANDIDATES // 2 + 2)[1:-1]
    both = [np.quantile(scores[kind], ranks) for kind in (labels, ~labels) if kind.any()]
    if labels.any() and not labels.all():  # between the two kinds, where they are far apart
        both.append(np.array([(scores[labels].min() + scores[~labels].max()) / 2]))
    thresholds = np.unique(np.concatenate(both)) if both else np.zeros(1)
    return thresholds, _count(scores, labels, thresholds)


def _shift(counts: _Counts, alpha: float) -> Any:
    alarms = clopper_pearson(counts.above_out, counts.outs, alpha)[1]
    misses = clopper_pearson(counts.ins - counts.above_in, counts.ins, alpha)[1]
    return np.where((alarms < 1) & (misses < 1), shift_of(alarms, misses), -np.inf)


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The most likely that so many correct guesses can be under (epsilon, delta)-DP."""
    if not 0 <= correct <= guesses <= canaries:
        raise ConfigError(
            f"{correct} correct of {guesses} guesses about {canaries} canaries is impossible."
        )
    chance = 1 / (1 + math.exp(-epsilon))
    tail = float(binom.sf(correct - 1, guesses, chance))
    if delta == 0 or correct == 0:
        return min(1.0, tail)
    below = binom.cdf(correct - 1, guesses, chance)
    width = np.arange(1, correct + 1)
    slope = float(((below - binom.cdf(correct - 1 - width, guesses, chance)) / width).max())
    return min(1.0, tail + 2 * canaries * delta * slope)


def one_run_epsilon(
    canaries: int, guesses: int, correct: int, delta: float, confidence: float
) -> float:
    """The largest epsilon that is refuted at this confidence; 0 if none is."""
    level, low, high = 1 - confidence, 0.0, _LARGEST
    if p_value(canaries, guesses, correct, low, delta) > level:
        return 0.0
    while high - low > 1e-6:
        middle = (low + high) / 2
        if p_value(canaries, guesses, correct, middle, delta) <= level:
            low = middle
        else:
            high = middle
    return low
