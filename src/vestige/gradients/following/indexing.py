"""Indexing and assignment."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.gradients.following.base import (
    Call,
    Lost,
    Meet,
    Result,
    agreed,
    aligned,
    ordered,
    picked,
    place_of,
    rows_of,
    sliced,
)
from vestige.gradients.rows import Meeting, Rows, Summed

_PARTS = (int, slice, Tensor, type(None), type(Ellipsis))


@dataclass
class Index:
    """An index with its ellipsis written out: a part for each axis, and None for each new one.

    Arrays of places, and numbers beside them, make a block of axes that starts at axis `first` of
    the result.
    """

    parts: list[Any]

    @classmethod
    def of(cls, index: Any, ndim: int) -> Index:
        """The index of a tensor of `ndim` axes."""
        parts = list(index) if isinstance(index, tuple) else [index]
        used = 0
        for i, part in enumerate(parts):
            if isinstance(part, np.integer):
                parts[i] = int(part)
            elif isinstance(part, np.ndarray) and part.dtype.kind in "iub":
                parts[i] = torch.from_numpy(np.ascontiguousarray(part))
            elif isinstance(part, list) and all(isinstance(p, int | np.integer) for p in part):
                parts[i] = torch.tensor([p if isinstance(p, bool) else int(p) for p in part])
            elif isinstance(part, bool) or not isinstance(part, _PARTS):
                raise Lost
            if part is not None and part is not Ellipsis:
                used += part.ndim if is_mask(part) else 1
        at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
        return cls([*parts[:at], *[slice(None)] * (ndim - used), *parts[at + 1 :]])

    @property
    def arrays(self) -> list[Tensor]:
        """The parts that are tensors."""
        return [p for p in self.parts if isinstance(p, Tensor)]

    def refuse_masks(self) -> None:
        """How many entries a mask picks is for the contents of all rows to say."""
        if any(is_mask(p) for p in self.arrays):
            raise Lost("positions picked by their content: examples differ in number")

    @property
    def chosen(self) -> list[int]:
        """Which parts are arrays, or numbers, which count as arrays beside them."""
        return [i for i, p in enumerate(self.parts) if isinstance(p, Tensor | int)]

    @property
    def kept(self) -> list[int]:
        """Which parts keep their axis."""
        chosen = self.chosen
        return [i for i, _ in enumerate(self.parts) if i not in chosen]

    @property
    def block(self) -> torch.Size:
        """The shape of the block."""
        shape: torch.Size = torch.broadcast_shapes(*(p.shape for p in self.arrays))
        return shape

    @property
    def first(self) -> int:
        """The axis of the result at which the block starts: 0 if its parts are not adjacent."""
        chosen = self.chosen
        adjacent = chosen[-1] - chosen[0] == len(chosen) - 1
        return sum(i < chosen[0] for i in self.kept) if adjacent else 0

    def part_of(self, axis: int) -> int:
        """Where the index of `axis` stands among the parts, of which None uses up no axis."""
        seen = -1
        for i, part in enumerate(self.parts):
            seen += part is not None
            if seen == axis:
                return i
        raise Lost

    def spread(self, rows: Rows, array: Tensor, out: Tensor) -> Rows:
        """The rows of an array of places, in the result."""
        axis, inner = place_of(rows, array.shape)
        return rows.at(out.shape, axis + self.first + len(self.block) - array.ndim, inner)


def is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def index_selected(call: Call) -> Result:
    """index_select: other axes freely, the rows' own by reordering."""
    parts: list[Any] = [slice(None)] * call.value.ndim
    parts[call.axis(1)] = call.argument(2, "index")
    if call.label is None:
        return _looked_up(call, Index.of(tuple(parts), call.value.ndim))
    return _indexed(call, call.rows, call.value, tuple(parts), call.out)


def indexed(call: Call) -> Result:
    """value[index]."""
    value, index = call.args
    label = call.see(value)
    if label is None:  # a constant looked up by rows, such as a table
        return _looked_up(call, Index.of(index, value.ndim))
    if not isinstance(label, Rows):
        return label
    return _indexed(call, label, value, index, call.out)


def _indexed(call: Call, rows: Rows, value: Tensor, given: Any, out: Tensor) -> Rows:
    index = Index.of(given, value.ndim)
    index.refuse_masks()
    axis, inner = place_of(rows, value.shape)
    at = index.part_of(axis)
    part = index.parts[at]
    if not index.arrays:  # numbers, slices and new axes only
        if isinstance(part, int):
            return picked(rows, value, part)
        after = sum(not isinstance(p, int) for p in index.parts[:at])
        return sliced(rows, value, part, out, after)
    if isinstance(part, Tensor):
        return _reordered(call, rows, value, index, out)
    if isinstance(part, int) or part != slice(None):
        raise Lost
    if any(call.see(p) is not None for p in index.arrays):
        raise Meet  # every row would be looked up at the places of every other
    after = index.kept.index(at)
    return rows.at(out.shape, after + (len(index.block) if after >= index.first else 0), inner)


def _reordered(call: Call, rows: Rows, value: Tensor, index: Index, out: Tensor) -> Rows:
    """The axis of the rows is indexed by an array: an order, or several arrays point by point."""
    axis, inner = place_of(rows, value.shape)
    at = index.part_of(axis)
    places = index.parts[at]
    call.see(places)  # rows may say in which order they come: the order is followed by its values
    owners = rows.owners(value.shape, axis, inner, value.device)
    order = owners[places.to(value.device)].expand(index.block).reshape(-1)
    suffix = prod(out.shape[index.first + len(index.block) :])
    label = ordered(order, (len(order), suffix), 0, rows.batch)
    for i, part in enumerate(index.parts):
        also = call.see(part) if isinstance(part, Tensor) and i != at else None
        if also is not None:
            agreed([label, index.spread(rows_of(also), part, out)])
    return label


def _looked_up(call: Call, index: Index) -> Rows:
    """A constant at places that rows give: each place belongs to its row."""
    index.refuse_masks()
    return agreed(
        [
            index.spread(rows_of(label), part, call.out)
            for part in index.arrays
            if (label := call.see(part)) is not None
        ]
    )


def assigned(call: Call) -> Result:
    """target[index] = value: the label of the target afterwards."""
    target, given, value = call.args
    before = call.see(target)
    if isinstance(before, Meeting | Summed):
        return before
    index = Index.of(given, target.ndim)
    content = call.see(value) if isinstance(value, Tensor) else None
    by_rows = [call.see(p) is not None for p in index.arrays]
    if any(by_rows):
        if content is None:
            return _filled(call, target, index, before)
        # Where each row says its own place, two of them may say the same.
        raise Meet if all(by_rows) and before is None else Lost
    if content is None:
        return before
    index.refuse_masks()
    rows = rows_of(content)
    if not rows.count:
        return before
    region = target.detach()[given]
    wanted = aligned(rows, value.shape[-region.ndim :], region.shape)
    possible = [
        rows.at(target.shape, axis, size // rows.count)
        for axis, size in enumerate(target.shape)
        if size % rows.count == 0 and size
    ]
    for label in possible if before is None else [before]:
        try:
            if _indexed(call, label, target, given, region).same(wanted):
                return label
        except (Lost, Meet):
            continue
    raise Meet


def index_put(call: Call) -> Result:
    """target.index_put(places, value), which is an assignment, or adds."""
    target, value = call.argument(0, "self"), call.argument(2, "values")
    given = tuple(call.argument(1, "indices"))
    labels = {id(t): x for t in (target, value, *given) if (x := call.see(t)) is not None}
    return assigned(Call(labels, (target, given, value), {}, call.out))


def index_added(call: Call) -> Result:
    """index_add, index_copy, index_reduce: slices of the source go to places along an axis."""
    source = call.argument(3, "source")
    content = call.see(source)
    if call.see(call.argument(2, "index")) is not None:
        raise Meet  # two rows may say the same place
    if content is None:
        return call.label
    dim, labels = call.axis(1), []
    for tensor in (call.value, source):
        if (label := call.see(tensor)) is not None:
            axis, inner = place_of(label, tensor.shape)
            if axis == dim:
                raise Meet
            labels.append(rows_of(label).at(call.out.shape, axis, inner))
    return agreed(labels)


def _filled(call: Call, target: Tensor, index: Index, before: Rows | None) -> Rows:
    """A constant at a mask over the first axes: like masked_fill."""
    mask, *others = index.parts
    if not is_mask(mask) or len(index.arrays) > 1 or any(p != slice(None) for p in others):
        raise Lost
    label = rows_of(call.see(mask))
    axis, inner = place_of(label, mask.shape)
    given = label.at(target.shape, axis, inner)
    return given if before is None else agreed([given, before])
