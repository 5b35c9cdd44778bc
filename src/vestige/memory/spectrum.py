"""Power-law exponents of weight matrices: how heavy the upper tail of a layer's spectrum is.

The eigenvalues x of W^T W are fitted by the density p(x) ~ x^(-rho) above a threshold xmin; rho is
the exponent. For a tail of n_i eigenvalues from xmin = x_i on, maximum likelihood gives

    rho_i = 1 + n_i / sum_j ln(x_j / x_i),    F_i(x) = 1 - (x / x_i)^(1 - rho_i),
    D_i = max_j |F_i(x_j) - (j - i) / n_i|    (the Kolmogorov-Smirnov distance).

The estimators differ in the matrix they look at and in the choice of the tail:

* "hill": the largest ceil(tail * n) eigenvalues. Convolutions are reshaped to (out, in * k * k).
* "clauset": every i from 0 to n - 2 is tried and the smallest D_i wins (Clauset, Shalizi and
  Newman, arXiv 0706.1062). Same matrix as "hill".
* "weightwatcher": what weightwatcher 0.7.7 computes by default on a machine without a GPU (Martin,
  Peng and Mahoney, arXiv 2002.06716): the k * k slices (out, in) of a convolution pooled, weights
  rounded to float32, eigenvalues above 1e-5, and fewer than 20 of them fitted in its own way. It
  leaves out some sizes, see `_slices`; their exponent is None.

"hill" and "clauset" drop eigenvalues below 1e-10 of the largest. Where fewer than two are left, or
they do not spread, or a weight is not finite, the exponent is None. No result is ever NaN.

Guarantee: a function of the weights alone, which are made from releases: no privacy cost. Weights,
gradients, random state and thread settings are left as they are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from vestige.checks import is_number, plain
from vestige.errors import ConfigError

# numpy and torch are imported where they are needed: the names and checks below cost nothing.
if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Array = NDArray[np.float64]

ESTIMATORS = ("hill", "clauset", "weightwatcher")
INTERVAL = (2.0, 6.0)
"""Where exponents of well trained layers lie: outside it a layer's memory is tempered."""

_CUT = 1e-10  # of the largest eigenvalue: anything below is rounding
_WATCHER_CUT = 1e-5  # absolute, so that this estimator depends on the scale of the weights
_WATCHER_EVALS = (8, 15_000)  # weightwatcher leaves out layers with fewer or more eigenvalues,
_WATCHER_ROWS = 50_000  # and those with a longer side
_WATCHER_FEW, _WATCHER_TAIL = 20, 8  # below so many eigenvalues, only tails of at least 8

# A mean log ratio this small, an exponent above 100,000, is float32 rounding: orthogonal matrices
# in float32 have about 5e-7.
_NO_SPREAD = 1e-5
# Squares below leave the range of float64 before they fall under the cut.
_SMALLEST = 1e-290
# A Gram matrix in float64 is off by a few 1e-16 of its largest eigenvalue. Results that rest on
# smaller eigenvalues than this share of it are computed again, from singular values.
_RESOLVED = 1e-5
_BLURRED = 1e-13  # of the largest: likewise where an eigenvalue lies this close to the cut
# Up to this size numpy works on one thread, which other programs cannot hold up: threads that wait
# for each other on a busy machine take a hundred times as long.
_SINGLE_THREAD = 64
_BLOCK = 2**18  # numbers at once in the search for xmin: 2 MB, which stay in the cache


@dataclass(frozen=True, eq=False)
class Fit:
    """The power law of one layer.

    `eigenvalues` are those left after the cut, ascending and read-only; the last `tail_size` of
    them, from `xmin` on, are the tail. `ks_distance` is the D of the tail.
    """

    exponent: float
    xmin: float
    tail_size: int
    ks_distance: float
    eigenvalues: Array


class _Estimate(NamedTuple):
    exponent: float
    start: int  # of the tail
    eigenvalues: Array  # after the cut, ascending


def exponent(weight: Tensor, estimator: str = "hill", tail: float = 0.5) -> float | None:
    """The power-law exponent of one weight of two or more dimensions, or None if it has none.

    `tail` is the share of the eigenvalues that "hill" takes; the other estimators find their own.
    """
    return exponents([weight], estimator, tail)[0]


def exponents(
    weights: Sequence[Tensor], estimator: str = "hill", tail: float = 0.5
) -> list[float | None]:
    """The exponents of several weights, those of equal size in one batch."""
    found = _estimates(weights, estimator, tail)
    return [None if estimate is None else estimate.exponent for estimate in found]


def fit(weight: Tensor, estimator: str = "hill", tail: float = 0.5) -> Fit | None:
    """The exponent of one weight with all that a table or a plot of it needs."""
    found = _estimates([weight], estimator, tail)[0]
    if found is None:
        return None
    import numpy as np

    values, start = found.eigenvalues.copy(), found.start
    values.setflags(write=False)
    slope = np.array([found.exponent - 1])
    distance = _distances(np.log(values), np.array([start]), slope)[0]
    return Fit(found.exponent, float(values[start]), len(values) - start, float(distance), values)


def tempering(
    exponent: float | None, interval: tuple[float, float] = INTERVAL, rate: float = 1.0
) -> float:
    """1 - exp(-rate * d) for an exponent at the distance d from the interval; 0 for None."""
    if exponent is None:
        return 0.0
    low, high = interval
    return -math.expm1(-rate * max(0.0, low - exponent, exponent - high))


def check(estimator: str, tail: float = 0.5) -> None:
    """Refuse an estimator that does not exist and a tail outside (0, 1]."""
    if estimator not in ESTIMATORS:
        raise ConfigError(
            f"estimator {estimator!r} is unknown: choose one of {', '.join(ESTIMATORS)}."
        )
    if not is_number(plain(tail)) or not 0 < tail <= 1:
        raise ConfigError(
            f"tail {tail!r} is not in (0, 1]: give the share of the eigenvalues that belongs to "
            "the tail, for example 0.5."
        )


def _estimates(weights: Sequence[Tensor], estimator: str, tail: float) -> list[_Estimate | None]:
    check(estimator, tail)
    for weight in weights:
        _check_weight(weight)
    matrices = _slices if estimator == "weightwatcher" else _matrix
    stacks = {i: stack for i, w in enumerate(weights) if (stack := matrices(w)) is not None}
    results: list[_Estimate | None] = [None] * len(weights)
    for (i, stack), values in zip(stacks.items(), _spectra(list(stacks.values())), strict=True):
        most = _most(weights[i], estimator)
        results[i], exact = _estimate(values, most, estimator, tail)
        if not exact:
            results[i], _ = _estimate(_singular(stack), most, estimator, tail)
    return results


def _check_weight(weight: Tensor) -> None:
    import torch

    if not isinstance(weight, torch.Tensor):
        raise ConfigError(f"a weight is a {type(weight).__name__}: pass torch tensors.")
    if weight.ndim < 2:
        raise ConfigError(
            f"a weight has the shape {tuple(weight.shape)}: a spectrum needs two or more "
            "dimensions; leave out biases and normalisation layers."
        )
    if not weight.is_floating_point():
        raise ConfigError(
            f"a weight has dtype {weight.dtype}: a spectrum needs real floating point numbers; "
            "convert it or leave it out."
        )


def _matrix(weight: Tensor) -> Tensor | None:
    """The weight as one matrix (1, shape[0], -1) in float64; None if it is empty."""
    if weight.numel() == 0:
        return None
    return _double(weight.detach()).reshape(1, weight.shape[0], -1)


def _double(values: Tensor) -> Tensor:
    import numpy as np
    import torch

    if values.device.type == "cpu" and values.dtype is torch.float32:
        # torch would share this between its threads, and waking them takes longer than the work.
        return torch.from_numpy(values.numpy().astype(np.float64))
    return values.double()


def _slices(weight: Tensor) -> Tensor | None:
    """The matrices that weightwatcher pools, in float64; None for a layer that it leaves out.

    Its reading of a convolution counts a wrong number of eigenvalues where in > out and k * k is
    even or k is large: such a layer can pass or miss its limits for that reason only. Of a
    one-dimensional convolution (out, in, k) it takes the slices (in, k) and of their eigenvalues
    the min(out, in, k) largest. Three-dimensional convolutions are unknown to it.
    """
    shape, area = weight.shape, 1
    if weight.ndim == 4:
        long, short = shape[0], shape[1]
        area = shape[2] * shape[3]
        # It swaps the two once for each slice.
        if long < short and area % 2 and long + short >= shape[2] + shape[3]:
            long, short = short, long
    elif weight.ndim < 4:
        long, short = max(shape), min(shape)
    else:
        return None
    low, high = _WATCHER_EVALS
    if not low <= short * area <= high or long > _WATCHER_ROWS or weight.numel() == 0:
        return None
    values = _double(weight.detach().float())
    if weight.ndim == 4:
        return values.permute(2, 3, 0, 1).reshape(area, shape[0], shape[1]) * math.sqrt(0.5)
    return values.reshape(-1, *shape[-2:])


def _spectra(stacks: Sequence[Tensor]) -> list[Array]:
    """Eigenvalues of each matrix of each stack, from Gram matrices of the smaller side in float64.

    float32 would lose the eigenvalues below 1e-7 of the largest and move those that remain. A stack
    with a number that is not finite has no eigenvalues.
    """
    stacks = [stack if stack.shape[1] <= stack.shape[2] else stack.mT for stack in stacks]
    small = [s.shape[1] <= _SINGLE_THREAD and s.device.type == "cpu" for s in stacks]
    batched = iter(
        _batched_spectra([s for s, alone in zip(stacks, small, strict=True) if not alone])
    )
    return [
        _small_spectrum(stack.numpy()) if alone else next(batched)
        for stack, alone in zip(stacks, small, strict=True)
    ]


def _small_spectrum(stack: Array) -> Array:
    """By numpy: half the work of a symmetric product, and no call for torch's threads.

    There is nothing to gain from a batch here: LAPACK takes one matrix at a time.
    """
    import numpy as np

    with np.errstate(invalid="ignore", over="ignore"):
        grams = stack @ stack.transpose(0, 2, 1)
        if not math.isfinite(grams.sum()):
            return grams[:0].ravel()
    return np.asarray(np.linalg.eigvalsh(grams), dtype=np.float64).ravel()


def _batched_spectra(stacks: Sequence[Tensor]) -> list[Array]:
    """By torch: Gram matrices of equal size in one batch, and one transfer to the host."""
    if not stacks:
        return []
    import torch

    grams = [stack @ stack.mT for stack in stacks]
    groups: dict[tuple[torch.device, int], list[int]] = {}
    for i, gram in enumerate(grams):
        groups.setdefault((gram.device, gram.shape[-1]), []).append(i)
    rows = []
    for members in groups.values():
        batch = torch.cat([grams[i] for i in members])
        # The solver may raise or hang on NaN, and to ask for NaN would make a GPU wait: it gets
        # zeros instead, and the sum in front of the eigenvalues tells the host.
        total = batch.sum((1, 2)).unsqueeze(1)
        values = torch.linalg.eigvalsh(batch.nan_to_num(0, 0, 0))
        rows.append(torch.cat((total, values), 1).flatten().to(grams[0].device))
    flat = torch.cat(rows).cpu().numpy()

    spectra: list[Array] = [flat] * len(stacks)
    start = 0
    for i in (i for members in groups.values() for i in members):
        count, n = grams[i].shape[:2]
        end = start + count * (n + 1)
        row = flat[start:end].reshape(count, n + 1)
        spectra[i] = row[:, 1:].ravel() if all(map(math.isfinite, row[:, 0])) else flat[:0]
        start = end
    return spectra


def _singular(stack: Tensor) -> Array:
    """The same eigenvalues from singular values: several times slower, exact when small."""
    import torch

    values: Array = torch.linalg.svdvals(stack).square().flatten().cpu().numpy()
    return values


def _most(weight: Tensor, estimator: str) -> int:
    """How many of the largest eigenvalues count: all, but for one-dimensional convolutions."""
    watcher = estimator == "weightwatcher" and weight.ndim == 3
    return min(weight.shape) if watcher else weight.numel()


def _estimate(
    values: Array, most: int, estimator: str, tail: float
) -> tuple[_Estimate | None, bool]:
    """The estimate from eigenvalues, and whether those of a Gram matrix were good enough for it."""
    import numpy as np

    values = np.sort(values)[-most:]
    largest = float(values[-1]) if len(values) else 0.0
    if not _SMALLEST < largest < math.inf:
        return None, True
    watcher = estimator == "weightwatcher"
    cut = _WATCHER_CUT if watcher else _CUT * largest
    first = int(values.searchsorted(cut, "right" if watcher else "left"))
    on_the_edge = any(
        abs(x - cut) < _BLURRED * largest for x in values[max(first - 1, 0) : first + 1]
    )
    kept = values[first:]
    if len(kept) < 2:
        return None, not on_the_edge
    found = _hill(kept, tail) if estimator == "hill" else _search(kept, watcher)
    if found is None:
        return None, not on_the_edge
    return found, not on_the_edge and kept[found.start] > _RESOLVED * largest


def _hill(values: Array, tail: float) -> _Estimate | None:
    """The exponent of the largest ceil(tail * n) eigenvalues."""
    import numpy as np

    # 0.07 * 100 is a little more than 7.
    size = math.ceil(tail * len(values) - 1e-9) or 1
    start = len(values) - size
    spread = float(np.log(values[start:] / values[start]).sum())
    if spread <= size * _NO_SPREAD:
        return None
    return _Estimate(1 + size / spread, start, values)


def _search(values: Array, watcher: bool) -> _Estimate | None:
    """The exponent of the tail with the smallest distance."""
    import numpy as np

    n, fewer, starts = len(values), 0, np.arange(len(values) - 1)
    if watcher and n < _WATCHER_FEW:
        # weightwatcher corrects the bias of small samples, and of very small ones takes them all.
        fewer, starts = 1, starts[: max(1, n - _WATCHER_TAIL + 1)]
    logs = np.log(values / values[-1])
    sizes = n - starts
    spreads = logs[::-1].cumsum()[::-1][: len(starts)] - sizes * logs[: len(starts)]
    spread_out = spreads > sizes * _NO_SPREAD
    slopes = np.divide(sizes - fewer, spreads, out=np.zeros(len(starts)), where=spread_out)
    distances = np.where(spread_out, _distances(logs, starts, slopes), 1.0)
    best = int(distances.argmin())
    if not spread_out[best]:
        return None
    return _Estimate(1 + float(slopes[best]), best, values)


def _distances(logs: Array, starts: NDArray[np.intp], slopes: Array) -> Array:
    """D of the tail from each start on with the exponent 1 + slope, a block of rows at a time."""
    import numpy as np

    n = len(logs)
    ranks = np.arange(n, dtype=np.float64)
    distances = np.empty(len(starts))
    rows = max(1, _BLOCK // n)
    for low in range(0, len(starts), rows):
        block = starts[low : low + rows, None]
        begin = block[0, 0]
        # Left of a row's own start both distributions become 0, which no maximum notices.
        model = np.maximum(logs[begin:] - logs[block], 0.0)
        model *= -slopes[low : low + rows, None]
        np.expm1(model, out=model)
        seen = np.maximum(ranks[begin:] - block, 0.0)
        seen /= n - block
        model += seen
        np.abs(model, out=model)
        distances[low : low + rows] = model.max(axis=1)
    return distances
