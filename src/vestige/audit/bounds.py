"""From the error rates of an attack to lower bounds on epsilon, with a stated confidence.

Three bounds, each at confidence 1 - alpha on its own: of membership, through the mechanism's
family, and of one run. docs/audit.md derives them.

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
from vestige.privacy.events import Event

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]
Numbers = npt.NDArray[np.int64]

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
class Trials:
    """Scores, who was in, and which trials choose the threshold that the others are judged by."""

    scores: Array
    inside: Flags
    choosing: Flags

    @classmethod
    def of(cls, scores: Array, inside: Flags, canary: Numbers, count: int) -> Trials:
        """The first half of `count` canaries chooses; all trials of a canary go together."""
        return cls(scores, inside, canary < count // 2)

    @property
    def first(self) -> tuple[Array, Flags]:
        """Those that choose."""
        return self.scores[self.choosing], self.inside[self.choosing]

    @property
    def judged(self) -> tuple[Array, Flags]:
        """The others."""
        return self.scores[~self.choosing], self.inside[~self.choosing]


@dataclass(frozen=True)
class Cut:
    """A threshold test on the trials that are judged, with what came of it."""

    threshold: float
    says_in: bool  # which verdict counts as a hit: "in" above the threshold, or "out" below it
    hits: int
    hit_trials: int
    false_alarms: int
    alarm_trials: int


def membership_epsilon(trials: Trials, delta: float, confidence: float) -> tuple[float, Cut]:
    """A lower bound on epsilon from a test of who was in the data.

    (epsilon, delta)-DP makes TPR <= e^epsilon FPR + delta for every test, and TNR <= e^epsilon FNR
    + delta: epsilon >= log((TPR - delta) / FPR), with the lower end of one rate and the upper end
    of the other, alpha/2 each. The first half chooses the threshold and the direction of the test.
    """
    alpha = (1 - confidence) / 2

    def bound(counts: _Counts, says_in: bool, alpha: float) -> Any:
        hits, hit_trials, alarms, alarm_trials = counts.verdicts(says_in)
        hit = clopper_pearson(hits, hit_trials, alpha)[0] - delta
        alarm = clopper_pearson(alarms, alarm_trials, alpha)[1]
        with np.errstate(all="ignore"):
            return np.where(hit > 0, np.log(np.maximum(hit, 1e-300) / alarm), -np.inf)

    thresholds = _candidates(*trials.first)
    counts = _count(*trials.first, thresholds)
    bounds = [np.asarray(bound(counts, says_in, _CAUTION * alpha)) for says_in in (True, False)]
    says_in = bool(bounds[0].max() >= bounds[1].max())
    chosen = thresholds[int(bounds[0 if says_in else 1].argmax())]
    judged = _count(*trials.judged, np.array([chosen]))
    value = float(bound(judged, says_in, alpha)[0])
    seen = (int(np.sum(number)) for number in judged.verdicts(says_in))
    return max(0.0, value), Cut(float(chosen), says_in, *seen)


def shift_lower(trials: Trials, confidence: float) -> float:
    """A lower end of mu where scores are N(0, 1) without and N(mu, 1) with the canary; or 0.

    No test has quantile(1 - FPR) + quantile(1 - FNR) above mu; both rates have their upper ends, at
    alpha/2 each. The scale of the scores does not matter: only the order of a score and the
    threshold does. The threshold is the one that would be best for two normals with the first
    half's means and spread, which is steadier than the best of its counts.
    """
    alpha = (1 - confidence) / 2
    scores, kinds = trials.first
    ins, outs = scores[kinds], scores[~kinds]
    _check_kinds(len(ins), len(outs))
    spread = math.sqrt((ins.var() * len(ins) + outs.var() * len(outs)) / len(scores)) or 1.0
    low, high = outs.mean(), ins.mean()
    thresholds = np.linspace(min(low, high) - 3 * spread, max(low, high) + 3 * spread, 200)
    expected = _Counts(
        len(ins) * ndtr((high - thresholds) / spread),
        len(outs) * ndtr((low - thresholds) / spread),
        len(ins),
        len(outs),
    )
    chosen = thresholds[int(np.asarray(_shift(expected, alpha)).argmax())]
    judged = _count(*trials.judged, np.array([chosen]))
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

    def verdicts(self, says_in: bool) -> tuple[Any, int, Any, int]:
        """Hits and their trials, false alarms and theirs, of the verdict "in" or of "out"."""
        if says_in:
            return self.above_in, self.ins, self.above_out, self.outs
        return self.outs - self.above_out, self.outs, self.ins - self.above_in, self.ins


def _count(scores: Array, labels: Flags, thresholds: Array) -> _Counts:
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


def _candidates(scores: Array, labels: Flags) -> Array:
    _check_kinds(int(labels.sum()), int((~labels).sum()))
    # Both kinds' own quantiles: where few canaries are in, most scores say nothing about them.
    ranks = np.linspace(0, 1, _CANDIDATES // 2 + 2)[1:-1]
    between = (scores[labels].min() + scores[~labels].max()) / 2  # where they are far apart
    quantiles = [np.quantile(scores[kind], ranks) for kind in (labels, ~labels)]
    return np.unique(np.concatenate([*quantiles, [between]]))


def _shift(counts: _Counts, alpha: float) -> Any:
    alarms = clopper_pearson(counts.above_out, counts.outs, alpha)[1]
    misses = clopper_pearson(counts.ins - counts.above_in, counts.ins, alpha)[1]
    return np.where((alarms < 1) & (misses < 1), shift_of(alarms, misses), -np.inf)


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The most likely that so many correct guesses can be under (epsilon, delta)-DP.

    With W ~ Binomial(guesses r, e^epsilon / (1 + e^epsilon)) and m canaries,
    P[v or more correct] <= P[W >= v] + 2 m delta max_i P[v > W >= v - i] / i over 0 < i <= v.
    """
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
    """The largest epsilon that is refuted at this confidence; 0 if none is.

    The number of guesses must not depend on the coins; the guesses may on each other.
    """
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
