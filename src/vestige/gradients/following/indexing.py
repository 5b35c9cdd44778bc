"""Indexing and assignment."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.gradients.following.base import (
    Args,
    Lost,
    Meet,
    Result,
    See,
    agreed,
    aligned,
    argument,
    from_front,
    place_of,
    rows_of,
)
from vestige.gradients.following.moving import ordered
from vestige.gradients.rows import Label, Meeting, Rows, Summed


def index_selected(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """index_select: other axes freely, the rows' own by reordering."""
    value, rows = args[0], rows_of(see(args[0]))
    dim = from_front(argument(args, kwargs, 1, "dim"), value.ndim)
    index: list[Any] = [slice(None)] * value.ndim
    index[dim] = argument(args, kwargs, 2, "index")
    return _indexed(see, rows, value, tuple(index), out)


def indexed(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """value[index]."""
    value, index = args
    label = see(value)
    if label is None:  # a constant looked up by rows, such as a table
        return _looked_up(see, value, index, out)
    if not isinstance(label, Rows):
        return label
    return _indexed(see, label, value, index, out)


def _spelled(index: Any, ndim: int) -> list[Any]:
    """An index with its ellipsis written out, one entry for each axis (and None for new ones)."""
    parts = list(index) if isinstance(index, tuple) else [index]
    used = 0
    for i, part in enumerate(parts):
        if isinstance(part, np.integer):
            parts[i] = int(part)
        elif isinstance(part, list) and all(type(place) is int for place in part):
            parts[i] = torch.tensor(part)
        elif isinstance(part, bool) or not isinstance(part, _PARTS):
            raise Lost
        if part is not None and part is not Ellipsis:
            used += part.ndim if is_mask(part) else 1
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return [*parts[:at], *[slice(None)] * (ndim - used), *parts[at + 1 :]]


_PARTS = (int, slice, Tensor, type(None), type(Ellipsis))


def is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def _indexed(see: See, rows: Rows, value: Tensor, index: Any, out: Tensor) -> Rows:
    parts = _spelled(index, value.ndim)
    arrays = [(i, p) for i, p in enumerate(parts) if isinstance(p, Tensor)]
    if any(is_mask(p) for _, p in arrays):
        raise Lost("positions picked by their content: examples differ in number")
    if rows.count == 1:
        for _, part in arrays:
            label = see(part)
            if label is not None and not (isinstance(label, Rows) and label.same(rows)):
                raise Meet
        return rows
    axis, inner = place_of(rows, value.shape)
    if not arrays:
        return _plainly_indexed(rows, value, parts, axis, inner, out)
    # A number beside an array of indices counts as one of them.
    chosen = [i for i, p in enumerate(parts) if isinstance(p, Tensor | int)]
    block = torch.broadcast_shapes(*(p.shape for _, p in arrays))
    adjacent = chosen[-1] - chosen[0] == len(chosen) - 1
    kept = [i for i, p in enumerate(parts) if i not in chosen]
    first = sum(i < chosen[0] for i in kept) if adjacent else 0
    at = _position(parts, axis)
    if at not in chosen:
        if not isinstance(parts[at], slice) or parts[at] != slice(None):
            raise Lost
        if any(see(p) is not None for _, p in arrays):
            raise Meet  # every row would be looked up at the places of every other
        after = kept.index(at) + (len(block) if kept.index(at) >= first else 0)
        return rows.at(out.shape, after, inner)
    owners = rows.owners(value.shape, axis, inner, value.device)
    picked = parts[at]
    if not isinstance(picked, Tensor):
        raise Lost
    see(picked)  # rows may say in which order they come: the order is followed by its values
    order = owners[picked.to(value.device)].expand(block).reshape(-1)
    suffix = prod(out.shape[first + len(block) :])
    flat = (len(order), suffix)
    label = ordered(order, flat, 0, rows.batch)
    for i, part in arrays:
        also = see(part) if i != at else None
        if also is not None:
            spread = rows_of(also)
            if spread.count > 1:
                where, width = place_of(spread, part.shape)
                spread = spread.at(out.shape, where + first + len(block) - part.ndim, width)
            agreed([label, spread])
    return label


def _position(parts: Sequence[Any], axis: int) -> int:
    """Where the index of `axis` stands among the parts, of which None uses up no axis."""
    seen = -1
    for i, part in enumerate(parts):
        seen += part is not None
        if seen == axis:
            return i
    raise Lost


def _plainly_indexed(
    rows: Rows, value: Tensor, parts: Sequence[Any], axis: int, inner: int, out: Tensor
) -> Rows:
    """Numbers, slices and new axes only."""
    at = _position(parts, axis)
    after = sum(not isinstance(p, int) for p in parts[:at])
    part = parts[at]
    if isinstance(part, int):
        owners = rows.owners(value.shape, axis, inner, value.device)
        return Rows(1, rows.batch, owners[part].reshape(1))
    if part == slice(None):
        return rows.at(out.shape, after, inner)
    start, stop, step = part.indices(value.shape[axis])
    whole = inner * rows.count
    if start % whole == 0 and step == 1 and (stop - start) % whole == 0 and stop > start:
        return rows.at(out.shape, after, inner)
    owners = rows.owners(value.shape, axis, inner, value.device)[part]
    return ordered(owners, out.shape, after, rows.batch)


def _looked_up(see: See, value: Tensor, index: Any, out: Tensor) -> Rows:
    """A constant at places that rows give: each place belongs to its row."""
    parts = _spelled(index, value.ndim)
    arrays = [p for p in parts if isinstance(p, Tensor)]
    if any(is_mask(p) for p in arrays):
        raise Lost("positions picked by their content: examples differ in number")
    chosen = [i for i, p in enumerate(parts) if isinstance(p, Tensor | int)]
    block = torch.broadcast_shapes(*(p.shape for p in arrays))
    adjacent = chosen[-1] - chosen[0] == len(chosen) - 1
    first = sum(i < chosen[0] for i, _ in enumerate(parts) if i not in chosen) if adjacent else 0
    found = []
    for part in arrays:
        if (label := see(part)) is not None:
            rows = rows_of(label)
            if rows.count > 1:
                axis, inner = place_of(rows, part.shape)
                rows = rows.at(out.shape, axis + first + len(block) - part.ndim, inner)
            found.append(rows)
    return agreed(found)


def assigned(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """target[index] = value: the label of the target afterwards."""
    target, index, value = args
    before = see(target)
    if isinstance(before, Meeting | Summed):
        return before
    parts = _spelled(index, target.ndim)
    arrays = [p for p in parts if isinstance(p, Tensor)]
    content = see(value) if isinstance(value, Tensor) else None
    if any(see(p) is not None for p in arrays) or (arrays and content is not None):
        # A mask over the first axes, and a constant: like masked_fill.
        if len(arrays) != 1 or not is_mask(arrays[0]) or content is not None:
            raise Lost
        if any(p != slice(None) for p in parts if not isinstance(p, Tensor)):
            raise Lost
        mask = arrays[0]
        if parts[0] is not mask:
            raise Lost
        shown = rows_of(see(mask))
        where, inner = place_of(shown, mask.shape)
        given = shown.at(target.shape, where, inner)
        return given if before is None else agreed([given, rows_of(before)])
    if content is None:
        return before
    rows = rows_of(content)
    region = target.detach()[index]
    wanted = aligned(rows, value.shape[-region.ndim :], region.shape)
    if rows.count == 1:
        return before if before is not None and rows_of(before).same(rows) else _give_up()
    tries = [before] if before is not None else []
    if not tries:
        tries = [
            rows.at(target.shape, axis, size // rows.count)
            for axis, size in enumerate(target.shape)
            if size % rows.count == 0 and size
        ]
    for label in tries:
        assert isinstance(label, Rows)
        try:
            if _indexed(see, label, target, index, region).same(wanted):
                return label
        except (Lost, Meet):
            continue
    raise Meet


def _give_up() -> Label:
    raise Meet
