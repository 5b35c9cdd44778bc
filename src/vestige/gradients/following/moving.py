"""Operations that move entries: axes in another order, repeated, joined, split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vestige.gradients.following.base import (
    Args,
    Family,
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
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Rows


def reshaped(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The same entries in the same order."""
    label = see(args[0])
    if isinstance(label, Rows) and next(tensors_in(out)).numel() != args[0].numel():
        raise Lost
    return label


def complex_pairs(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A last axis of two numbers becomes one complex number, or the other way round."""
    value, rows = args[0], rows_of(see(args[0]))
    axis, inner = place_of(rows, value.shape)
    if axis >= min(value.ndim, out.ndim):
        raise Lost
    return rows.at(out.shape, axis, inner)


def appended(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Each entry becomes a vector: one_hot. Without a number of classes the longest row decides."""
    rows = rows_of(see(args[0]))
    if argument(args, kwargs, 1, "num_classes", -1) < 0:
        raise Meet
    return Rows(rows.stride * out.shape[-1], rows.batch, rows.order)


def permuted(axes: Callable[[Args, dict[str, Any], int], Sequence[int]]) -> Family:
    """Axes in another order: `axes` says which old axis each new one is."""

    def family(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
        value, rows = args[0], see(args[0])
        if not isinstance(rows, Rows):
            return rows
        axis, inner = place_of(rows, value.shape)
        order = [from_front(a, value.ndim) for a in axes(args, kwargs, value.ndim)]
        return rows.at(out.shape, order.index(axis), inner)

    return family


def permute_order(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    dims = kwargs["dims"] if "dims" in kwargs else args[1:]
    return dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims


def transpose_order(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    a = argument(args, kwargs, 1, "dim0", kwargs.get("axis0"))
    b = argument(args, kwargs, 2, "dim1", kwargs.get("axis1"))
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def reversed_order(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    return range(ndim - 1, -1, -1)


def last_two_swapped(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


def movedim(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """torch.movedim, by moving the numbers of the axes in the same way."""
    value, rows = args[0], see(args[0])
    if not isinstance(rows, Rows):
        return rows
    axis, inner = place_of(rows, value.shape)
    # Axis i of the probe has i + 1 entries, so that its shape tells the new order.
    probe = torch.empty(range(1, value.ndim + 1), device="meta").movedim(*args[1:], **kwargs)
    return rows.at(out.shape, list(probe.shape).index(axis + 1), inner)


def expanded(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """expand, broadcast_to: aligned on the right."""
    return aligned(rows_of(see(args[0])), args[0].shape, out.shape)


def broadcast(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """broadcast_tensors: each by itself."""
    given = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else args
    return [
        None if (label := see(t)) is None else aligned(rows_of(label), t.shape, wide.shape)
        for t, wide in zip(given, out, strict=True)
    ]


def repeated(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """repeat and tile: whole blocks one after the other."""
    value, rows = args[0], rows_of(see(args[0]))
    axis, inner = place_of(rows, value.shape)
    return rows.at(out.shape, axis + out.ndim - value.ndim, inner)


def interleaved(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """repeat_interleave by a number."""
    value, rows = args[0], rows_of(see(args[0]))
    times, dim = argument(args, kwargs, 1, "repeats"), argument(args, kwargs, 2, "dim")
    if dim is None or not isinstance(times, int):
        raise Lost
    axis, inner = place_of(rows, value.shape)
    return rows.at(out.shape, axis, inner * times if from_front(dim, value.ndim) == axis else inner)


def joined(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """cat along an axis. Along the rows' own axis the rows of all parts follow each other."""
    parts = list(argument(args, kwargs, 0, "tensors"))
    dim = from_front(argument(args, kwargs, 1, "dim", kwargs.get("axis", 0)), out.ndim)
    parts = [t for t in parts if t.numel()]  # an empty one brings nothing
    found = [(t, rows_of(label)) for t in parts if (label := see(t)) is not None]
    places = {place_of(rows, t.shape) for t, rows in found if rows.count > 1}
    if not places and all(rows.same(found[0][1]) for _, rows in found):
        return found[0][1]  # parts of one row
    if any(axis != dim for axis, _ in places):
        if len(places) > 1:
            raise Meet
        axis, inner = next(iter(places))
        return agreed([rows.at(out.shape, axis, inner) for _, rows in found])
    if len(found) < len(parts):  # a constant among the rows belongs to nobody
        raise Meet
    if len(places) == 1 and all(rows.same(found[0][1]) for _, rows in found):
        return found[0][1].at(out.shape, *next(iter(places)))
    owners = [_along(rows, t.shape, dim, out.device) for t, rows in found]
    return ordered(torch.cat(owners), out.shape, dim, found[0][1].batch)


def _along(rows: Rows, shape: Sequence[int], dim: int, device: torch.device) -> Tensor:
    """The row that each index of `dim` belongs to, where rows are on it or are only one."""
    if rows.count > 1:
        return rows.owners(shape, dim, place_of(rows, shape)[1], device)
    return rows.owners((1,), 0, 1, device).expand(shape[dim])


def stacked(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """stack on a new axis."""
    parts = list(argument(args, kwargs, 0, "tensors"))
    dim = from_front(argument(args, kwargs, 1, "dim", 0), out.ndim)
    found = []
    for t in parts:
        if (label := see(t)) is not None:
            rows = rows_of(label)
            if rows.count > 1:
                axis, inner = place_of(rows, t.shape)
                rows = rows.at(out.shape, axis + (dim <= axis), inner)
            found.append(rows)
    one_each = len(found) == len(parts) and all(rows.count == 1 for rows in found)
    if one_each and not all(found[0].same(rows) for rows in found):
        owners = [_along(rows, (1,), 0, out.device) for rows in found]
        return ordered(torch.cat(owners), out.shape, dim, found[0].batch)
    return agreed(found)


def split(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Parts along an axis, in order: split, chunk, tensor_split."""
    value, rows = args[0], rows_of(see(args[0]))
    dim = from_front(argument(args, kwargs, 2, "dim", 0), value.ndim)
    labels: list[Label | None] = []
    start = 0
    for part in out:
        labels.append(_sliced(rows, value, dim, slice(start, start + part.shape[dim]), part))
        start += part.shape[dim]
    return labels


def unbound(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Every index of an axis by itself."""
    value, rows = args[0], rows_of(see(args[0]))
    dim = from_front(argument(args, kwargs, 1, "dim", 0), value.ndim)
    return [_selected(rows, value, dim, i, part) for i, part in enumerate(out)]


def selected(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """One index of an axis."""
    value, rows = args[0], rows_of(see(args[0]))
    dim = from_front(argument(args, kwargs, 1, "dim"), value.ndim)
    return _selected(rows, value, dim, argument(args, kwargs, 2, "index"), out)


def narrowed(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A stretch of an axis."""
    value, rows = args[0], rows_of(see(args[0]))
    dim = from_front(argument(args, kwargs, 1, "dim"), value.ndim)
    start = from_front(argument(args, kwargs, 2, "start"), value.shape[dim])
    if not isinstance(start, int):
        raise Lost
    return _sliced(rows, value, dim, slice(start, start + out.shape[dim]), out)


def flipped(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Axes backwards."""
    value, rows = args[0], rows_of(see(args[0]))
    dims = kwargs["dims"] if "dims" in kwargs else args[1:]
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    axis, inner = place_of(rows, value.shape)
    if axis not in {from_front(d, value.ndim) for d in dims}:
        return rows
    return ordered(
        rows.owners(value.shape, axis, inner, value.device).flip(0), out.shape, axis, rows.batch
    )


def rolled(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Axes turned round."""
    value, rows = args[0], rows_of(see(args[0]))
    shifts, dims = argument(args, kwargs, 1, "shifts"), argument(args, kwargs, 2, "dims")
    if dims is None:
        raise Lost
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else [from_front(d, value.ndim) for d in dims]
    axis, inner = place_of(rows, value.shape)
    owners = rows.owners(value.shape, axis, inner, value.device)
    moved = [s for s, d in zip(shifts, dims, strict=True) if from_front(d, value.ndim) == axis]
    return ordered(owners.roll(sum(moved)), out.shape, axis, rows.batch) if moved else rows


def padded(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """F.pad of other axes than the rows'."""
    value, rows = args[0], rows_of(see(args[0]))
    axis, inner = place_of(rows, value.shape)
    if out.shape[axis] != value.shape[axis]:
        raise Meet
    pads = list(argument(args, kwargs, 1, "pad"))
    at = 2 * (value.ndim - 1 - axis)
    if any(pads[at : at + 2]):  # one entry fewer on one side and one more on the other
        raise Meet
    return rows.at(out.shape, axis, inner)


def unfolded(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Tensor.unfold(dim, size, step): windows along one axis, on a new last one."""
    value, rows = args[0], rows_of(see(args[0]))
    axis, inner = place_of(rows, value.shape)
    if len(args) < 4 or from_front(argument(args, kwargs, 1, "dimension"), value.ndim) == axis:
        raise Lost
    return rows.at(out.shape, axis, inner)


def ordered(owners: Tensor, shape: Sequence[int], axis: int, batch: int) -> Rows:
    """Rows in the order of `owners` along an axis; without an order where it is the plain one."""
    suffix = prod(shape[axis + 1 :])
    if len(owners) % batch == 0 and len(owners):
        plain, inner = torch.arange(len(owners), device=owners.device), len(owners) // batch
        if torch.equal(owners, plain % batch):
            return Rows(suffix, batch)
        if inner > 1 and torch.equal(owners, plain.div(inner, rounding_mode="floor")):
            return Rows(suffix * inner, batch)
    return Rows(suffix, batch, owners)


def _sliced(rows: Rows, value: Tensor, dim: int, part: slice, out: Tensor) -> Rows:
    """A slice of one axis."""
    axis, inner = place_of(rows, value.shape)
    if axis != dim:
        return rows.at(out.shape, axis, inner)
    start, stop, step = part.indices(value.shape[axis])
    whole = inner * rows.count
    if start % whole == 0 and step == 1 and (stop - start) % whole == 0 and stop > start:
        return rows.at(out.shape, axis, inner)
    owners = rows.owners(value.shape, axis, inner, value.device)[part]
    return ordered(owners, out.shape, axis, rows.batch)


def _selected(rows: Rows, value: Tensor, dim: int, index: Any, out: Tensor) -> Rows:
    """One index of one axis, which is then gone."""
    axis, inner = place_of(rows, value.shape)
    if axis != dim:
        return rows.at(out.shape, axis - (dim < axis), inner)
    owners = rows.owners(value.shape, axis, inner, value.device)
    return Rows(1, rows.batch, owners[index].reshape(1))
