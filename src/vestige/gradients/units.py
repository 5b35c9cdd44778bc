"""A privacy unit with several rows: they are more positions of one example.

    views   the K augmented copies of one record
    units   up to K rows of one user, among them stand-ins for those that the user does not have

A unit's loss is the mean of its rows' losses, so its gradient is sum_k w_k g_k / K, with w_k = 1
for views and K / (rows that there are), or 0 for a stand-in, for users. Every use of a parameter is
linear in the output gradient, and (units * K, t, d) is (units, K t, d) in other words: folded like
that, norms, clipping and sums are those of units, in every rule. This is the one place.

Guarantee: one unit moves the clipped sum by at most the bound, whatever its rows are; a row that is
not finite takes its whole unit out. With one row to a unit nothing is changed, bit for bit.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.rules.convolution import Convolved
from vestige.gradients.uses import LookedUp, Outer, PerExample, Use, Viewed
from vestige.sampling.loader import Batch


@dataclass(frozen=True)
class Fold:
    """`rows` rows to a unit, one after the other; `weights` (all rows,) are w_k, None for ones."""

    rows: int
    weights: Tensor | None = None

    @classmethod
    def of(cls, batch: Batch) -> Fold:
        """The units of a physical batch."""
        return cls(batch.unit_rows, batch.weights)

    def __call__(self, use: Use) -> Use:
        """The use of all rows as that of their units."""
        if self.rows == 1:
            return use
        if isinstance(use, PerExample):
            return PerExample(self.sums(use.values))
        if isinstance(use, Outer):
            return Outer(self._positions(use.a), self._positions(self._weighted(use.g)))
        if isinstance(use, LookedUp):
            g = self._positions(self._weighted(use.g))
            return LookedUp(use.indices.reshape(len(g), -1), g, use.shape[0])
        if isinstance(use, Convolved):
            return use.of_units(self.rows, self._weighted(use.g))
        if isinstance(use, Viewed):
            whole = copy.copy(use)
            whole.use = self(use.use)
            return whole
        raise UnsupportedModel(
            f"a gradient rule gave a {type(use).__name__}, which units of {self.rows} rows are not "
            "known for: use views and units with the rules of vestige.gradients alone."
        )

    def sums(self, values: Tensor) -> Tensor:
        """Numbers of rows (units * K, ...) added up by unit, (units, ...)."""
        if self.rows == 1:
            return values
        by_unit: Tensor = self._weighted(values).unflatten(0, (-1, self.rows))
        return by_unit.sum(1)

    def spread(self, values: Tensor) -> Tensor:
        """Numbers of units (units, ...) repeated for their rows."""
        return values if self.rows == 1 else values.repeat_interleave(self.rows, 0)

    def _weighted(self, values: Tensor) -> Tensor:
        if self.weights is None:
            return values
        weights = self.weights.to(values).view(-1, *[1] * (values.ndim - 1))
        # Whatever a stand-in holds, also if that is not a number.
        return torch.where(weights == 0, 0, values * weights)

    def _positions(self, values: Tensor) -> Tensor:
        """(units * K, d) or (units * K, t, d) as (units, K t, d)."""
        return values.reshape(len(values) // self.rows, -1, values.shape[-1])
