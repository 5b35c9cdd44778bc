"""The law of noise: a test that a sample is Gaussian of a known scale."""

from __future__ import annotations

import numpy as np
from scipy import stats

FALSE_ALARM = 1e-8


def is_noise(values, std):
    """Whether `values` pass for independent draws from N(0, std^2)."""
    values = np.asarray(values, dtype=np.float64)
    chi = float(np.sum((values / std) ** 2))
    tails = 2 * min(stats.chi2.cdf(chi, len(values)), stats.chi2.sf(chi, len(values)))
    fits = stats.kstest(values / std, "norm").pvalue
    return min(tails, fits) > FALSE_ALARM / 2


def assert_noise(values, std):
    assert is_noise(values, std)
    assert not is_noise(values, std * 2 / 3)
    assert not is_noise(values, std * 3 / 2)
