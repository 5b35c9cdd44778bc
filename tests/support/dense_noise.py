"""Correlated noise as a dense matrix, against which the banded form is compared."""

from __future__ import annotations

import math

import numpy as np
from scipy.linalg import toeplitz

ORDERS_AND_BANDS = [(0.5, 1), (0.3, 2), (0.5, 8), (0.65, 3), (0.8, 16), (1.0, 4), (0.9, 40)]


def dense(order, bands, steps):
    """C itself, from the binomial series and not from the recursion."""
    series = [math.gamma(k + order) / (math.gamma(order) * math.factorial(k)) for k in range(bands)]
    column = np.zeros(steps)
    column[: min(bands, steps)] = series[:steps]
    return toeplitz(column, np.zeros(steps))
