"""Operations that move entries: axes in another order, repeated, joined, split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.gradients.following.base import (
    Call,
    Family,
    Lost,
    Meet,
    Result,
    agreed,
    aligned,
    from_front,
    ordered,
    picked,
    place_of,
    rows_of,
    sliced,
)
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Rows


def reshaped(call: Call) -> Result:
    """The same entries in the same order."""
    if isinstance(call.label, Rows) and call.result.numel() != call.value.numel():
        raise Lost
    return call.label


def complex_pairs(call: Call) -> Result:
    """A last axis of two numbers becomes one complex number, or the other way round."""
    axis, inner = call.place
    if axis >= min(call.value.ndim, call.out.ndim):
        raise Lost
    return call.stays(axis, inner)


def appended(call: Call) -> Result:
    """Each entry becomes a vector: one_hot. Without a number of classes the longest row decides."""
    rows = call.rows
    if call.argument(1, "num_classes", -1) < 0:
        raise Meet
    return Rows(rows.stride * call.out.shape[-1], rows.batch, rows.order)


def permuted(axes: Callable[[Call], Sequence[int]]) -> Family:
    """Axes in another order: `axes` says which old axis each new one is."""

    def family(call: Call) -> Result:
        if not isinstance(call.label, Rows):
            return call.label
        axis, inner = call.place
        order = [from_front(a, call.value.ndim) for a in axes(call)]
        return call.stays(order.index(axis), inner)

    return family


def permute_order(call: Call) -> Sequence[int]:
    return _numbers(call.kwargs["dims"] if "dims" in call.kwargs else call.args[1:])


def _numbers(given: Sequence[Any]) -> Sequence[int]:
    """Axes that are given one by one, or as one sequence."""
    return given[0] if len(given) == 1 and not isinstance(given[0], int) else given


def transpose_order(call: Call) -> Sequence[int]:
    a = call.argument(1, "dim0", call.kwargs.get("axis0"))
    b = call.argument(2, "dim1", call.kwargs.get("axis1"))
    order = list(range(call.value.ndim))
    order[a], order[b] = order[b], order[a]
    return order


def reversed_order(call: Call) -> Sequence[int]:
    return range(call.value.ndim - 1, -1, -1)


def last_two_swapped(call: Call) -> Sequence[int]:
    ndim = call.value.ndim
    return [*range(ndim - 2), ndim - 1, ndim - 2]


def movedim_order(call: Call) -> Sequence[int]:
    """By moving the axes of a probe, whose axis i has i + 1 entries."""
    probe = torch.empty(range(1, call.value.ndim + 1), device="meta")
    return [size - 1 for size in probe.movedim(*call.args[1:], **call.kwargs).shape]


def expanded(call: Call) -> Result:
    """expand, broadcast_to: aligned on the right. A constant may be given the shape of rows."""
    return None if call.label is None else aligned(call.label, call.value.shape, call.out.shape)


def broadcast(call: Call) -> Result:
    """broadcast_tensors: each by itself."""
    args = call.args
    given = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else args
    return [
        None if (label := call.see(t)) is None else aligned(label, t.shape, wide.shape)
        for t, wide in zip(given, call.out, strict=True)
    ]


def repeated(call: Call) -> Result:
    """repeat and tile: whole blocks one after the other."""
    axis, inner = call.place
    return call.stays(axis + call.out.ndim - call.value.ndim, inner)


def interleaved(call: Call) -> Result:
    """repeat_interleave by a number."""
    times, dim = call.argument(1, "repeats"), call.argument(2, "dim")
    if dim is None or not isinstance(times, int):
        raise Lost
    axis, inner = call.place
    along_rows = from_front(dim, call.value.ndim) == axis
    return call.stays(axis, inner * times if along_rows else inner)


def joined(call: Call) -> Result:
    """cat along an axis. Along the rows' own axis the rows of all parts follow each other."""
    out = call.out
    parts = list(call.argument(0, "tensors"))
    dim = from_front(call.argument(1, "dim", call.kwargs.get("axis", 0)), out.ndim)
    parts = [t for t in parts if t.numel()]  # an empty one brings nothing
    labelled = [(t, rows_of(label)) for t in parts if (label := call.see(t)) is not None]
    places = {place_of(rows, t.shape) for t, rows in labelled if rows.count > 1}
    first = labelled[0][1]
    alike = all(rows.same(first) for _, rows in labelled)
    if not places and alike:
        return first  # parts of one row
    if any(axis != dim for axis, _ in places):
        if len(places) > 1:
            raise Meet
        axis, inner = next(iter(places))
        return agreed([rows.at(out.shape, axis, inner) for _, rows in labelled])
    if len(labelled) < len(parts):  # a constant among the rows belongs to nobody
        raise Meet
    if len(places) == 1 and alike:
        return first.at(out.shape, *next(iter(places)))
    owners = [_along(rows, t.shape, dim, out.device) for t, rows in labelled]
    return ordered(torch.cat(owners), out.shape, dim, first.batch)


def _along(rows: Rows, shape: Sequence[int], dim: int, device: torch.device) -> Tensor:
    """The row that each index of `dim` belongs to, where rows are on it or are only one."""
    if rows.count > 1:
        return rows.owners(shape, dim, place_of(rows, shape)[1], device)
    return rows.owners((1,), 0, 1, device).expand(shape[dim])


def stacked(call: Call) -> Result:
    """stack on a new axis."""
    parts, out = list(call.argument(0, "tensors")), call.out
    dim = from_front(call.argument(1, "dim", 0), out.ndim)
    labels = []
    for t in parts:
        if (label := call.see(t)) is not None:
            rows = rows_of(label)
            if rows.count > 1:
                axis, inner = place_of(rows, t.shape)
                rows = rows.at(out.shape, axis + (dim <= axis), inner)
            labels.append(rows)
    one_each = len(labels) == len(parts) and all(rows.count == 1 for rows in labels)
    if one_each and not all(labels[0].same(rows) for rows in labels):
        return _side_by_side(labels, out, dim)
    return agreed(labels)


def _side_by_side(labels: Sequence[Rows], out: Tensor, dim: int) -> Rows:
    """Single rows along a new axis."""
    owners = [_along(rows, (1,), 0, out.device) for rows in labels]
    return ordered(torch.cat(owners), out.shape, dim, labels[0].batch)


def padded_together(call: Call) -> Result:
    """pad_sequence: records of different lengths on one axis."""
    sequences = call.argument(0, "sequences")
    labels = [rows_of(call.see(t)) for t in sequences]
    if any(rows.count != 1 for rows in labels):
        raise Lost
    return _side_by_side(labels, call.out, 0 if call.argument(1, "batch_first", False) else 1)


def constructed(call: Call) -> Result:
    """tensor(data), as_tensor(data): a copy, or numbers of single rows side by side."""
    return stacked(call) if isinstance(call.args[0], list | tuple) else call.label


def lent(call: Call) -> Result:
    """x.new_tensor(data): x says no more than the type."""
    data = call.argument(1, "data")
    return call.see(data) if isinstance(data, Tensor) else None


def one_below_the_other(call: Call) -> Result:
    """vstack: cat along the first axis, or stack where there is no second one."""
    axes = {t.ndim for t in tensors_in(call.args)}
    if len(axes) > 1:
        raise Lost
    return joined(call) if axes.pop() > 1 else stacked(call)


def split(call: Call) -> Result:
    """Parts along an axis, in order: split, chunk, tensor_split."""
    return _split(call, call.axis(2, 0))


def split_along(axis: int) -> Family:
    """The same along one axis: vsplit, hsplit, dsplit."""
    return lambda call: _split(call, min(axis, call.value.ndim - 1))


def _split(call: Call, dim: int) -> Result:
    labels: list[Label | None] = []
    start = 0
    for part in call.out:
        labels.append(_sliced(call, dim, slice(start, start + part.shape[dim]), part))
        start += part.shape[dim]
    return labels


def unbound(call: Call) -> Result:
    """Every index of an axis by itself."""
    dim = call.axis(1, 0)
    return [_selected(call, dim, i, part) for i, part in enumerate(call.out)]


def selected(call: Call) -> Result:
    """One index of an axis."""
    return _selected(call, call.axis(1), call.argument(2, "index"), call.out)


def narrowed(call: Call) -> Result:
    """A stretch of an axis."""
    dim = call.axis(1)
    start = from_front(call.argument(2, "start"), call.value.shape[dim])
    if not isinstance(start, int):
        raise Lost
    return _sliced(call, dim, slice(start, start + call.out.shape[dim]), call.out)


def _sliced(call: Call, dim: int, part: slice, out: Tensor) -> Rows:
    """A slice of one axis."""
    axis, inner = call.place
    if axis != dim:
        return call.stays(axis, inner, out)
    return sliced(call.rows, call.value, part, out, axis)


def _selected(call: Call, dim: int, index: Any, out: Tensor) -> Rows:
    """One index of one axis, which is then gone."""
    axis, inner = call.place
    if axis != dim:
        return call.stays(axis - (dim < axis), inner, out)
    return picked(call.rows, call.value, index)


def flipped(call: Call) -> Result:
    """Axes backwards."""
    return _flipped(call, _numbers(call.kwargs["dims"] if "dims" in call.kwargs else call.args[1:]))


def flipped_along(axis: int) -> Family:
    """One axis backwards: flipud, fliplr."""
    return lambda call: _flipped(call, [axis])


def rotated(call: Call) -> Result:
    """rot90 of two other axes."""
    axis, inner = call.place
    if axis in {from_front(d, call.value.ndim) for d in call.argument(2, "dims", (0, 1))}:
        raise Meet
    return call.stays(axis, inner)


def _flipped(call: Call, dims: Sequence[int]) -> Result:
    value, rows = call.value, call.rows
    axis, inner = call.place
    if axis not in {from_front(d, value.ndim) for d in dims}:
        return rows
    owners = rows.owners(value.shape, axis, inner, value.device)
    return ordered(owners.flip(0), call.out.shape, axis, rows.batch)


def rolled(call: Call) -> Result:
    """Axes turned round."""
    value, rows = call.value, call.rows
    shifts, dims = call.argument(1, "shifts"), call.argument(2, "dims")
    if dims is None:
        raise Lost
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [from_front(d, value.ndim) for d in ([dims] if isinstance(dims, int) else dims)]
    axis, inner = call.place
    owners = rows.owners(value.shape, axis, inner, value.device)
    moved = [s for s, d in zip(shifts, dims, strict=True) if d == axis]
    return ordered(owners.roll(sum(moved)), call.out.shape, axis, rows.batch) if moved else rows


def padded(call: Call) -> Result:
    """F.pad of other axes than the rows'."""
    value = call.value
    axis, inner = call.place
    if call.out.shape[axis] != value.shape[axis]:
        raise Meet
    pads = list(call.argument(1, "pad"))
    at = 2 * (value.ndim - 1 - axis)
    if any(pads[at : at + 2]):  # one entry fewer on one side and one more on the other
        raise Meet
    return call.stays(axis, inner)


def unfolded(call: Call) -> Result:
    """Tensor.unfold(dim, size, step): windows along one axis, on a new last one."""
    axis, inner = call.place
    if len(call.args) < 4 or call.axis(1, name="dimension") == axis:
        raise Lost
    return call.stays(axis, inner)
