"""The matrices behind correlated noise: their coefficients, inverses, variances, sensitivities.

Noise C^-1 Z, with Z white, hides C G, with G the sums of all lots: C decides what a record costs,
C^-1 how noisy the releases are. Banded C is Toeplitz with first column c, the fractional power
`order` of the matrix of prefix sums, cut off after `bands`:

    c_0 = 1,   c_k = c_(k-1) (k - 1 + order) / k   for 0 < k < bands

Its inverse has the response w of 1 / c(z) as first column, and row t of C^-1 Z the variance
w_0^2 + ... + w_t^2. A column of C has norm |c|, or less where the last row cuts it off, and columns
`bands` apart do not overlap: k lots of one record, `bands` or more apart, move C G by at most
sqrt(k) |c| clipping norms. A tree has a row of C for each node, with ones at the node's leaves. One
record that is in n_i of node i's leaves moves the nodes by at most sqrt(sum_i n_i^2) clipping
norms, in whatever directions its gradients point.
A banded inverse is the other way round: C^-1 is banded, with first column d, and C is full. So
columns of one record overlap however far apart its lots are: `inverse_sensitivity` adds them up.

Papers: BandMF, arXiv 2306.08153; square-root factorisation (order 1/2), arXiv 2202.11205; trees in
DP-FTRL, arXiv 2103.00039; gradients may follow from earlier releases, arXiv 2202.08312; banded
inverse square root, arXiv 2505.12128; momentum in the workload, arXiv 2405.13763.
Nothing here sees data or noise.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from vestige.checks import check_count, is_number
from vestige.errors import ConfigError

Series = npt.NDArray[np.float64]


def coefficients(order: float, bands: int) -> Series:
    """The first `bands` coefficients of (1 - z)^-order; one band is white noise."""
    given: Any = order
    if not is_number(given) or not 0 < given <= 1:
        raise ConfigError(
            f"order={order!r} must be in (0, 1]: 0.5 is the square root of the prefix sums, more "
            "makes neighbouring noise cancel more."
        )
    check_count("bands", bands)
    k = np.arange(1, bands)
    return np.concatenate([[1.0], np.cumprod((k - 1 + order) / k)])


def norm(c: Series) -> float:
    """|c|_2: what a lot of one record moves C G by, in clipping norms."""
    return math.sqrt(c @ c)


def inverse_response(c: Series, steps: int) -> Series:
    """The first column of C^-1: the impulse response of 1 / c(z), `steps` of it."""
    from scipy.signal import lfilter  # here, since it takes long to import

    impulse = np.zeros(steps)
    impulse[0] = 1.0
    column: Series = lfilter([1.0], c, impulse)
    return column


def marginal_variances(c: Series, steps: int) -> Series:
    """The variance of a coordinate of C^-1 Z, row by row, where Z has variance 1."""
    return np.cumsum(inverse_response(c, steps) ** 2)


def inverse_root(momentum: float, bands: int) -> Series:
    """The first `bands` coefficients d of sqrt((1 - z) (1 - momentum z)); one band is white noise.

    1 / ((1 - z) (1 - momentum z)) turns releases into weights, by SGD with momentum or as an
    average with that decay. Only d_0 is positive: the coefficients of 1 / d(z) are moments of a
    positive measure on [momentum, 1], hence log-convex, and the inverse of such a series has no
    positive coefficient after the first (Kaluza 1928).
    """
    check_count("bands", bands)
    k = np.arange(1, bands)
    root = np.concatenate([[1.0], np.cumprod((k - 1.5) / k)])
    d: Series = np.convolve(root, root * float(momentum) ** np.arange(bands))[:bands]
    d[1:] = np.minimum(d[1:], 0.0)  # what rounding has left of a zero
    return d


def inverse_sensitivity(d: Series, steps: int, period: int) -> float:
    """What one record moves C G by, in clipping norms: `steps` rows, lots `period` or more apart by
    whole periods, 1 / d(z) the first column of C.

    d_0 = 1 is the only positive coefficient, so C and C^T C have no negative entry, and the worst
    gradients are of full norm and one direction, in all of the record's lots: |sum of columns|.
    Columns are shifts of each other, so the lots from the first on are the worst.
    """
    from scipy.signal import lfilter  # here, since it takes long to import

    if (np.asarray(d)[1:] > 0).any():
        raise ValueError("a positive coefficient after the first: the sum of columns is no bound")
    lots = np.zeros(check_count("steps", steps))
    lots[:: check_count("period", period)] = 1.0
    return norm(lfilter([1.0], d, lots))


def tree_sensitivity(steps: int, period: int) -> int:
    """The squared sensitivity of a tree over `steps` lots, of which a record is in every
    `period`-th: max over the first of sum over nodes of (the record's leaves in the node)^2.

    The tree is completed to the next power of two by leaves without data. A record that comes once
    (`period >= steps`) is in one node of every height: ceil(log2 steps) + 1.
    """
    check_count("steps", steps)
    phase = np.arange(min(check_count("period", period), steps))

    def before(ends: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """How many of a record's lots come before `ends`, for every phase."""
        return np.maximum(0, -((phase - np.minimum(ends, steps)[:, None]) // period))

    total = np.zeros(len(phase), dtype=np.int64)
    for height in range((steps - 1).bit_length() + 1):
        if 2**height <= period:  # a node has each record at most once, and each lot is in one node
            total += before(np.array([steps]))[0]
            continue
        nodes = -(-steps // 2**height)
        counts = np.diff(before(np.arange(nodes + 1) * 2**height), axis=0)
        total += (counts**2).sum(axis=0)
    return int(total.max())
