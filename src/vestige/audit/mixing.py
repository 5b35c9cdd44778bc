"""The known covariance of correlated noise, and what it hides.

Correlated noise is a fixed linear map of independent draws: n_t = sum_k B_tk z_k. The map is read
off the method's own process by handing it impulses in place of noise. With S = B B^T the law of the
rows is N(0, S) in every coordinate, so that

    L^-1 n,  S = L L^T,                 is white,
    sum_st (S^-1)_st <g_s, g_t> / C^2   is how far a record that adds g_t to its lots moves them,

squared and in units of the noise. The second is what a charge must cover.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.methods import Method
from vestige.methods.method import DrawContext
from vestige.plan import PrivacyPlan
from vestige.release.correlation import Correlation
from vestige.sampling.streams import NOISE, Randomness

Matrix = npt.NDArray[np.float64]


class _Impulses:
    """Stands for the random streams: the draw of each number is a unit vector of its own."""

    def __init__(self) -> None:
        self._places: dict[tuple[bytes, int], int] = {}

    def normal_blocks(
        self, like: Tensor, step: int, purpose: bytes = NOISE
    ) -> Iterator[tuple[slice, Tensor]]:
        """A unit vector, the same one for the same number."""
        place = self._places.setdefault((purpose, step), len(self._places))
        impulse = torch.zeros_like(like)
        impulse[place] = 1.0
        yield slice(0, like.numel()), impulse


class Mixing:
    """The first `rows` rows of a method's correlated noise, in units of sigma * C."""

    def __init__(self, method: Method, plan: PrivacyPlan, rows: int) -> None:
        room = 4 * rows + 64  # a tree of n leaves has fewer than 2 n nodes
        like = torch.zeros(room, dtype=torch.float64)
        # No records and no parameters: the noise may not know of them.
        impulses: Any = _Impulses()
        context = DrawContext(like, plan, cast("Randomness", impulses), plan.dataset_size)
        correlation = method.noise(context)
        assert isinstance(correlation, Correlation)
        self._map = torch.stack([correlation.noise(row).clone() for row in range(rows)]).numpy()
        self.covariance: Matrix = self._map @ self._map.T
        self.marginals = np.sqrt(np.diag(self.covariance))

    def whitened(self, rows: Tensor) -> Tensor:
        """L^-1 n: white and standard where the rows are this noise in units of sigma * C."""
        count = len(rows)
        root = torch.from_numpy(np.linalg.cholesky(self.covariance[:count, :count]))
        white: Tensor = torch.linalg.solve_triangular(root, rows.double(), upper=False)
        return white

    def revealed(self, rows: int, lots: Sequence[int]) -> float:
        """How far one record of clipping norm 1 in these of the first `rows` rows can move them.

        The squared distance in units of sigma * C, for the worst signs that a search by single
        changes finds: a distance that a record can reach, so that no charge may be below it.
        """
        inverse: Matrix = np.asarray(np.linalg.inv(self.covariance[:rows, :rows]), np.float64)
        precision: Matrix = inverse[np.ix_(lots, lots)]
        longest = np.asarray(np.linalg.eigh(precision)[1][:, -1], dtype=np.float64)
        starts = np.ones(len(lots)), np.where(longest < 0, -1.0, 1.0)
        return max(_climbed(precision, signs) for signs in starts)


def _climbed(precision: Matrix, signs: npt.NDArray[np.float64]) -> float:
    """The quadratic form after every single change of sign that raises it."""
    value = -math.inf
    while True:
        pulls = 2 * signs * (precision @ signs - np.diag(precision) * signs)
        reached = float(signs @ precision @ signs)
        worst = int(pulls.argmin())
        if pulls[worst] >= 0 or reached <= value:
            return max(reached, value)
        value = reached
        signs = signs.copy()
        signs[worst] *= -1
