"""The collector of methods that need every example's whole gradient at hand: rows of (n, P).

Guarantee: each row's contribution is bounded by the geometry, whatever the row; rows that are not
finite contribute nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vestige.geometry import Geometry
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector, ForwardRecord, _Held
from vestige.gradients.groups import Groups, Slot
from vestige.gradients.uses import Use, row_squares


class DenseCollector(Collector):
    """Adds up what a geometry makes of the gradients, instead of the gradients themselves."""

    def __init__(self, groups: Groups, clip: Clip, geometry: Geometry) -> None:
        super().__init__(groups, clip)
        self._geometry = geometry
        self.total = self.total.new_zeros(geometry.size)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The l2 bound of one example's part in each segment of the release."""
        return self._geometry.bounds(self.clip.bounds[0])

    def arrive(self, record: ForwardRecord, uses: Sequence[tuple[Slot, Use]]) -> None:
        """Hold everything until the backward pass is over."""
        self._held[0] += [_Held(slot, use, None) for slot, use in uses]

    def _settle(self, held: list[_Held]) -> None:
        rows = self._rows(held)
        square_norms = row_squares(rows)
        self._look(square_norms, 0)
        bad = ~(square_norms <= self.clip.most_square(0, rows.dtype))
        rows.masked_fill_(bad[:, None], 0)
        square_norms = square_norms.masked_fill(bad, 0)
        rounding = self._rounding()
        factors = self.clip.factors(square_norms, 0, self._scale, torch.float64, rounding)
        lengths = (square_norms.sqrt() * factors).masked_fill_(square_norms == 0, 0)
        self.total += self._geometry.contribution(rows, lengths, self.clip.bounds[0])

    def _rows(self, held: list[_Held]) -> Tensor:
        """The gradients, an example in each row."""
        dense = [(h.slot, h.use.dense()) for h in held]
        rows = self.total.new_zeros(len(dense[0][1]), self.groups.size)
        for slot, values in dense:
            rows[:, slot.start : slot.stop] += values.reshape(len(values), -1)
        return rows
