"""Which row of the batch every entry of a tensor belongs to.

A tensor of the forward pass is a constant, or carries one of three labels:

    Rows      every entry belongs to one row; entry l (counted in row-major order) belongs to
              order[(l // stride) % count], where no order means 0, 1, 2, ...
    Summed    a sum or mean over the rows of what belongs to one row each: a loss
    Meeting   entries depend on several rows, or on rows that could not be followed

The stride says where the rows are without naming an axis, so a reshape changes nothing; (rows,
positions) flattened either way, views of a record joined by `cat`, heads folded into the batch and
rows that were sorted are all `Rows`. A constant may be given any rows: it depends on none, and
whatever it meets later has to agree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor

from vestige.errors import PrivacyError
from vestige.gradients.refs import Uncovered


class _Unsaved:
    """Labels belong to one forward pass: a pickled or copied tensor has none."""

    def __reduce__(self) -> Any:
        return type(None), ()


@dataclass(frozen=True)
class Summed(_Unsaved):
    """A linear sum over rows, made by the operation `what`: it may be a loss, nothing else."""

    what: str = "'sum'"


@dataclass(frozen=True)
class Meeting(_Unsaved):
    """Rows meet in the operation `what`; with `lost`, they only could not be followed there.

    A `ragged` tensor's shape depends on the contents of the rows.
    """

    what: str
    lost: bool = False
    ragged: bool = False

    def refusal(self) -> PrivacyError:
        """Why a tensor with this label may not meet a parameter or enter a loss."""
        if self.lost:
            return Uncovered(
                f"the rows of the batch could not be followed through {self.what}, so that no "
                "gradient belongs to one example"
            )
        return PrivacyError(
            f"the examples of a batch meet in {self.what}: what follows it depends on several of "
            "them, and the clip bound would not hold. Look for an operation across the batch "
            "(statistics, attention over the batch, a contrastive term) or a batch axis that is "
            "not the first (batch_first=False if it is the second)."
        )


class Rows(_Unsaved):
    """Every entry belongs to row order[(l // stride) % count] of a batch of `batch` rows."""

    __slots__ = ("_canonical", "batch", "count", "order", "stride")

    def __init__(self, stride: int, batch: int, order: Tensor | None = None) -> None:
        self.stride, self.batch, self.order = stride, batch, order
        self.count = batch if order is None else len(order)
        self._canonical: Tensor | None = None

    def place(self, shape: Sequence[int]) -> tuple[int, int] | None:
        """The axis that has the rows and how many entries in a row share one, or None.

        A single row (count 1) is everywhere, so it has no place.
        """
        if self.count == 1:
            return None
        if self.count == 0:  # an empty batch is where something is empty
            return (list(shape).index(0), 1) if 0 in shape else None
        suffix = 1
        for axis in range(len(shape) - 1, -1, -1):
            size = shape[axis]
            if suffix <= self.stride and self.stride * self.count <= suffix * size:
                inner = self.stride // suffix
                whole = self.stride % suffix == 0 and size % (inner * self.count) == 0
                return (axis, inner) if whole else None
            suffix *= size or 1
        return None

    def at(self, shape: Sequence[int], axis: int, inner: int) -> Rows:
        """The same rows on `axis` of another shape."""
        return Rows(inner * prod(s or 1 for s in shape[axis + 1 :]), self.batch, self.order)

    def owners(self, shape: Sequence[int], axis: int, inner: int, device: torch.device) -> Tensor:
        """The row that each index of `axis` belongs to."""
        index = torch.arange(shape[axis], device=device).div_(inner, rounding_mode="floor")
        index %= self.count
        return index if self.order is None else self.order.to(device)[index]

    def same(self, other: Rows) -> bool:
        """Whether two tensors of one shape have the same rows in the same places."""
        if self.count != other.count or (self.count > 1 and self.stride != other.stride):
            return False
        if self.order is other.order:
            return True
        if self.order is None or other.order is None:
            return False
        return torch.equal(self.order, other.order.to(self.order.device))

    def first(self, value: Tensor) -> Tensor:
        """`value` (which has these rows) with the batch's rows first, in their own order.

        (n, outer, ..., inner, ...): what is left of the axis that had the rows stays in its place,
        as two axes where both are longer than 1.
        """
        if self.batch == 1:
            return value if value.ndim and value.shape[0] == 1 else value.unsqueeze(0)
        place = self.place(value.shape)
        if place is None:
            raise Uncovered("an operation's rows are spread over several axes")
        axis, inner = place
        if axis or value.shape[0] != self.count:
            outer = value.shape[axis] // (self.count * inner)
            value = value.unflatten(axis, (outer, self.count, inner)).movedim(axis + 1, 0)
            if outer == 1 or inner == 1:
                value = value.flatten(axis + 1, axis + 2)
                if outer == inner == 1:
                    value = value.squeeze(axis + 1)
        return value if self.order is None else value.index_select(0, self.canonical())

    def summed(self, value: Tensor) -> Tensor:
        """`value` with the batch's rows first, and the axis that had them summed away."""
        if self.batch == 1:
            return value.unsqueeze(0)
        place = self.place(value.shape)
        assert place is not None
        axis, inner = place
        outer = value.shape[axis] // (self.count * inner)
        value = value.unflatten(axis, (outer, self.count, inner)).movedim(axis + 1, 0)
        value = value.sum((axis + 1, axis + 2))
        return value if self.order is None else value.index_select(0, self.canonical())

    def canonical(self) -> Tensor:
        """The index that puts ordered rows back; Uncovered unless each row is there once."""
        assert self.order is not None
        if self._canonical is None:
            order, index = self.order.sort()
            plain = torch.arange(self.batch, device=order.device)
            if len(order) != self.batch or not torch.equal(order, plain):
                raise Uncovered("rows were picked, so that examples differ in number")
            self._canonical = index
        return self._canonical


Label = Rows | Summed | Meeting
