"""Correlated noise as a dense matrix, against which the banded form is compared."""

from __future__ import annotations

import math

import numpy as np
import torch
from scipy.linalg import toeplitz

from vestige.release.correlated import Tree

ORDERS_AND_BANDS = [(0.5, 1), (0.3, 2), (0.5, 8), (0.65, 3), (0.8, 16), (1.0, 4), (0.9, 40)]


def dense(order, bands, steps):
    """C itself, from the binomial series and not from the recursion."""
    series = [math.gamma(k + order) / (math.gamma(order) * math.factorial(k)) for k in range(bands)]
    column = np.zeros(steps)
    column[: min(bands, steps)] = series[:steps]
    return toeplitz(column, np.zeros(steps))


class Units:
    """Unit vectors: the k-th new index is e_k, so that a row shows its weights."""

    def __init__(self, size):
        self.size, self.indices = size, []

    def __call__(self, index):
        assert index not in self.indices, f"draw {index} was used twice"
        self.indices.append(index)
        unit = torch.zeros(self.size, dtype=torch.float64)
        unit[len(self.indices) - 1] = 1
        yield slice(0, self.size), unit


def empty(size, dtype=torch.float64):
    return torch.zeros(size, dtype=dtype)


def rows_of(process, rows):
    return torch.stack([process.at(row).clone() for row in rows]).numpy()


def matrix(make, steps, draws, first=0):
    """The matrix from fresh draws to rows, and the index of each draw."""
    units = Units(draws)
    made = rows_of(make(units), range(first, first + steps))
    assert not made[:, len(units.indices) :].any()
    return made[:, : len(units.indices)], units.indices


def node_index(start, length, height, position):
    """From left to right in the completed tree that starts at row `start`."""
    completed = 1
    while completed < length:
        completed *= 2
    return 2 * completed * start + position * 2 ** (height + 1) + 2**height - 1


def tree_matrix(length, honaker, rows, first=0):
    return matrix(
        lambda units: Tree(empty(units.size), units, length, honaker, first=first),
        rows,
        4 * rows + 40,
        first,
    )
