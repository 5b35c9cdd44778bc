"""The bound of one-run auditing: how many correct guesses a private run allows.

m canaries are in the data with probability 1/2 each, by independent coins. From what was released
the auditor guesses r of the coins and abstains on the others. Under (epsilon, delta)-DP, with
W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),

    P[v or more correct guesses] <= P[W >= v] + 2 m delta max_(0 < i <= v) P[v > W >= v - i] / i

which grows with epsilon: every epsilon at which it is at most 1 - confidence is refuted.

Paper: Steinke, Nasr, Jagielski 2023, arXiv 2305.08846 (Theorem 5.2 and Appendix D).
Guarantee: the bound exceeds the true epsilon with probability at most 1 - confidence, whatever the
dependence between the guesses. r must not depend on the coins.
"""

from __future__ import annotations

import math

import numpy as np

from vestige.errors import ConfigError

_LARGEST = 60.0  # an epsilon beyond which no number of guesses could tell


def p_value(canaries: int, guesses: int, correct: int, epsilon: float, delta: float) -> float:
    """The most likely that so many correct guesses can be under (epsilon, delta)-DP."""
    from scipy.stats import binom

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
