"""Secret noise that is correlated from one lot to the next, so that less of it accumulates.

Row t is the noise of lot t, in units of sigma * clipping norm; every z is standard normal:

    Banded   n_t = |c| z_t - c_1 n_(t-1) - ... - c_(b-1) n_(t-b+1)      that is, n = |c| C^-1 z
    Tree     n_t = N_(t+1) - N_t,   N_t the noise of the tree's estimate of the first t sums
    Moving   n_t = z_t + d_1 z_(t-1) + ... + d_(b-1) z_(t-b+1)              that is, n = C^-1 z

`Banded` is BandMF (arXiv 2306.08153) with the coefficients of factorisation.py, `Tree` is DP-FTRL
(arXiv 2103.00039), `Moving` a banded inverse (arXiv 2505.12128). Past noise would uncover past
sums, so nothing here can be saved or copied.

Guarantee, for releases s_t + sigma n_t, the clipping norm being 1 (arXiv 2202.08312 for gradients
that follow from earlier releases):
Banded. C maps the releases one to one to C s + sigma |c| z. A lot with the record changes rows t to
t + b - 1 of that by c_0 g, ..., c_(b-1) g, where g depends on releases before t alone: one Gaussian
with multiplier sigma, subsampled at the rate at which the lot was drawn. Lots of the record that
are b or more apart have no row in common and compose as so many events: with cyclic Poisson lots
(sampling/lots.py) at most one event for every b lots, at rate b times the sampling rate, to be
charged before the first of them.
Tree. Every node is released once, when its last leaf with data is in, with noise of std sigma.
The estimates (plain and Honaker's), their differences from row to row and the completions are
functions of noisy nodes, so they cost nothing: a tree is one Gaussian with multiplier
sigma / sqrt(tree_sensitivity(length, period)), without subsampling, to be charged before its first
row, for records that come every `period` lots.
Moving. C maps the `length` releases of a block one to one to C s + sigma z, and C s moves by at
most inverse_sensitivity(d, length, period) if a record's lots are whole periods apart: one Gaussian
with multiplier sigma / that, without subsampling, to be charged before the block's first row. C has
full columns, so nothing shorter than a block is an event of its own.
Restarts. A process has an empty past wherever it begins, as when a run is resumed, which makes C
block diagonal: its columns still have norm at most |c|, and columns b apart or in different blocks
do not overlap. Groups and order may change with the block, so it is charged as a run of its own
from its first row on, also where the cycle or the tree before it was cut short.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vestige.checks import check_count
from vestige.privacy.factorisation import Series, marginal_variances, norm

Fresh = Callable[[int], Iterator[tuple[slice, Tensor]]]
"""From an index to a standard normal vector, a block at a time: `Randomness.normal_blocks`."""


class NoiseProcess(ABC):
    """Noise that is correlated from row to row, a row for each lot. Secret, and never saved.

    Processes are made `like` a flat tensor: its length, dtype and device. No two vectors that they
    ask `fresh` for have the same index. The past before row `first` is empty.
    """

    def __init__(self, fresh: Fresh, first: int) -> None:
        self._fresh = fresh
        self._first = self._next = first

    def at(self, row: int) -> Tensor:
        """The noise of `row`, flat: to be read before the next call, and not to be written to.

        Rows that were passed over (abandoned lots) are drawn and thrown away, so that later rows
        keep their law. If anything interrupts this, it can be called again with the same result.
        """
        if row < self._next:
            raise RuntimeError(
                f"the noise of row {row} was asked for after that of row {self._next - 1}: a row's "
                "noise hides one lot only, so rows never go back."
            )
        while True:
            noise = self._make(self._next)
            self._next += 1  # only this makes the row a part of the past
            if self._next > row:
                return noise

    @abstractmethod
    def marginal(self, row: int) -> float:
        """The standard deviation of one coordinate of the row's noise, in the same units."""

    def _age(self, row: int) -> int:
        if row < self._first:
            raise RuntimeError(f"row {row} is before the first, {self._first}: it has no noise.")
        return row - self._first

    @abstractmethod
    def _make(self, row: int) -> Tensor:
        """The noise of the row after the last, without a change to what the last ones left."""

    def __getstate__(self) -> None:
        raise TypeError("the noise of a private run is secret and cannot be saved or copied")


class Banded(NoiseProcess):
    """n = |c| C^-1 z with C the banded Toeplitz matrix of `coefficients`. One band: white noise.

    Keeps the last bands - 1 rows and the one in the making, in a ring.
    """

    def __init__(self, like: Tensor, fresh: Fresh, coefficients: Series, *, first: int = 0) -> None:
        super().__init__(fresh, first)
        bands = len(coefficients)
        self._coefficients, self._norm = coefficients, norm(coefficients)
        self._ring = like.new_zeros(bands, like.numel())
        # weights[new, old]: the ring's place `old` is (new - old) mod bands rows back.
        lags = np.subtract.outer(np.arange(bands), np.arange(bands)) % bands
        self._weights = like.new_tensor(-coefficients[lags])
        self._variances = np.ones(0)

    def _make(self, row: int) -> Tensor:
        place = (row - self._first) % len(self._ring)
        noise, weights = self._ring[place], self._weights[place]
        for block, z in self._fresh(row):
            part = torch.mul(z, self._norm, out=noise[block])
            for past in (slice(0, place), slice(place + 1, len(self._ring))):
                if past.start < past.stop:
                    part.addmv_(self._ring[past, block].t(), weights[past])
        return noise

    def marginal(self, row: int) -> float:
        """|c| sqrt(w_0^2 + ... + w_t^2) in row t of the block."""
        t = self._age(row)
        if t >= len(self._variances):
            self._variances = marginal_variances(self._coefficients, max(1024, 2 * t))
        return self._norm * math.sqrt(self._variances[t])


class Moving(NoiseProcess):
    """n = C^-1 z with C^-1 the banded Toeplitz matrix of `weights`, anew every `length` rows.

    Keeps nothing of earlier rows: their z is made again from its index.
    """

    def __init__(
        self, like: Tensor, fresh: Fresh, weights: Series, length: int, *, first: int = 0
    ) -> None:
        super().__init__(fresh, first)
        self._weights, self._length = weights, check_count("length", length)
        self._row = like.new_zeros(like.numel())

    def at(self, row: int) -> Tensor:
        """The noise of `row`, as for every process; rows that were passed over are not drawn."""
        self._next = max(self._next, row)
        return super().at(row)

    def _make(self, row: int) -> Tensor:
        for lag, weight in enumerate(self._of(row)):
            for block, z in self._fresh(row - lag):
                if lag:
                    self._row[block].add_(z, alpha=float(weight))
                else:
                    self._row[block] = z
        return self._row

    def marginal(self, row: int) -> float:
        """sqrt(1 + d_1^2 + ...), over the draws that the row's block has so far."""
        return norm(self._of(row))

    def _of(self, row: int) -> Series:
        """The weights of the row's draws, the newest first: none is of an earlier block."""
        return self._weights[: self._age(row) % self._length + 1]


@dataclass(frozen=True)
class _Merge:
    """A step up the tree:  node := fresh * z_draw + (1 - fresh) * (node + its left sibling)."""

    draw: int
    fresh: float = 1.0
    sibling: int | None = None  # its height; None for an only child


class Tree(NoiseProcess):
    """The noise of prefix sums by a binary tree with a lot in each leaf, anew every `length` rows.

    Plain: a prefix is estimated by its few complete nodes, N_t being the sum of their noise.
    `honaker`: a node is estimated from all nodes below it as well, each level weighted by its
    precision; the variance of height h falls from 1 to 1 / (2 - 2^-h). When the next tree begins,
    the old one is completed to a power of two by leaves without data, and its total is estimated
    from the root: that row carries (total's noise - last prefix's noise) + first leaf's. Nodes
    without any data are known to be zero and never drawn.

    The nodes that are noised are those of the completed tree: `factorisation.tree_sensitivity`.
    Keeps a vector for each height, one more leaf and the row in the making.
    """

    def __init__(
        self, like: Tensor, fresh: Fresh, length: int, honaker: bool = True, *, first: int = 0
    ) -> None:
        super().__init__(fresh, first)
        self._length, self._honaker = check_count("length", length), honaker
        self._root = (length - 1).bit_length()  # its height in the completed tree
        self._heights = [h for h in range(length.bit_length()) if length >> h & 1]  # at the end
        # Leaves of even and of odd trees have a place each: the first leaf of a tree is made while
        # the last one of the old tree is still needed.
        self._nodes = like.new_zeros(length.bit_length() + 1, like.numel())
        self._row = like.new_zeros(like.numel())

    def _make(self, row: int) -> Tensor:
        tree, leaf = divmod(row - self._first, self._length)
        merges = self._grown(tree, leaf)
        height = _trailing_ones(leaf)
        new = self._node(tree, height)
        if leaf == 0:
            self._complete(tree - 1)
        else:
            self._row.zero_()
        self._run(merges, new, tree)
        for below in range(height):
            self._row.sub_(self._node(tree, below))
        return self._row.add_(new)

    def _complete(self, tree: int) -> None:
        """The noise of the tree's total less that of its last prefix, into the row."""
        merges = self._completed(tree)
        if not merges:
            self._row.zero_()
            return
        self._row.copy_(self._node(tree, self._heights[0]))
        self._run(merges, self._row, tree)
        for height in self._heights:
            self._row.sub_(self._node(tree, height))

    def _run(self, merges: list[_Merge], node: Tensor, tree: int) -> None:
        for merge in merges:
            for block, z in self._fresh(merge.draw):
                part = node[block]
                if merge.fresh == 1:
                    part.copy_(z)
                    continue
                if merge.sibling is not None:
                    part.add_(self._node(tree, merge.sibling)[block])
                part.mul_(1 - merge.fresh).add_(z, alpha=merge.fresh)

    def marginal(self, row: int) -> float:
        """Exact, from the weights of the independent nodes that the row is made of."""
        tree, leaf = divmod(self._age(row), self._length)
        below = range(_trailing_ones(leaf))
        variance = self._variance(self._grown(tree, leaf), {}, below)
        if leaf == 0:
            merges = self._completed(tree - 1)
            if merges:
                variance += self._variance(merges, {self._heights[0]: 1.0}, self._heights)
        return math.sqrt(variance)

    def _variance(
        self, merges: list[_Merge], weights: dict[int, float], less: range | list[int]
    ) -> float:
        """The variance of a climb that begins with `weights` of known nodes, less known nodes."""
        fresh = 0.0
        for merge in merges:
            rest = 1 - merge.fresh
            fresh = rest**2 * fresh + merge.fresh**2
            if merge.sibling is not None:
                weights[merge.sibling] = 1.0
            weights = {height: rest * weight for height, weight in weights.items()}
        for height in less:
            weights[height] = weights.get(height, 0.0) - 1
        return fresh + sum(w**2 * self._node_variance(h) for h, w in weights.items())

    def _grown(self, tree: int, leaf: int) -> list[_Merge]:
        """From a new leaf to the largest node that it completes."""
        top = _trailing_ones(leaf)
        if not self._honaker:
            return [_Merge(self._index(tree, top, leaf))]
        return [
            _Merge(
                self._index(tree, height, leaf),
                self._node_variance(height),
                height - 1 if height else None,
            )
            for height in range(top + 1)
        ]

    def _completed(self, tree: int) -> list[_Merge]:
        """From the last complete node to the root; nothing before the first tree or at the root."""
        last, low = self._length - 1, self._heights[0]
        if tree < 0 or low == self._root:
            return []
        if not self._honaker:
            return [_Merge(self._index(tree, self._root, last))]
        merges, variance = [], self._node_variance(low)
        for height in range(low, self._root):
            sibling = height if height > low and height in self._heights else None
            if sibling is not None:
                variance += self._node_variance(height)
            variance /= 1 + variance  # of the inverse-variance mean with one more, of variance 1
            merges.append(_Merge(self._index(tree, height + 1, last), variance, sibling))
        return merges

    def _node_variance(self, height: int) -> float:
        return 1 / (2 - 0.5**height) if self._honaker else 1.0

    def _node(self, tree: int, height: int) -> Tensor:
        return self._nodes[-1 if height == 0 and tree % 2 else height]

    def _index(self, tree: int, height: int, leaf: int) -> int:
        """A number that no other node of this or of another tree has: from left to right.

        Trees are told apart by their first row, so that a process which begins in the middle of
        another's tree has draws of its own even under the same key.
        """
        inorder = 2 * (leaf >> height << height) + (1 << height) - 1
        start = self._first + tree * self._length
        return (start << self._root + 1) + inorder


def _trailing_ones(number: int) -> int:
    return (~number & number + 1).bit_length() - 1
