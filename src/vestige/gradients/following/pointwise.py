"""Operations entry by entry, along an axis, on each entry of the first axis, and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vestige.gradients.following.base import (
    SUMMED,
    Call,
    Family,
    Lost,
    Meet,
    Result,
    agreed,
    aligned,
    from_front,
    place_of,
    rows_of,
)
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Meeting, Rows, Summed


def pointwise(call: Call) -> Result:
    """Each entry of the result depends on the entries of the arguments in its place."""
    return _entrywise(call, call.args, call.kwargs)


def _entrywise(call: Call, *values: Any) -> Rows:
    shape = call.result.shape
    return agreed(
        [
            aligned(label, tensor.shape, shape)
            for tensor in tensors_in(values)
            if (label := call.see(tensor)) is not None
        ]
    )


def linear_pointwise(call: Call) -> Result:
    """Pointwise and linear: a sum over rows times a constant, or plus another, stays a sum."""
    labels = call.labels(call.args, call.kwargs)
    if labels and all(isinstance(label, Summed) for label in labels):
        return labels[0]
    return pointwise(call)


def scaling(call: Call) -> Result:
    """A quotient: a sum over rows may be divided by one constant."""
    first, *others = call.args
    if isinstance(first, Tensor) and isinstance(call.see(first), Summed):
        counts = [t for t in tensors_in((others, call.kwargs)) if call.see(t) is not None]
        # A mean by hand, sum / count: whoever reads the loss puts a fixed count in its place.
        if any(t.requires_grad or not isinstance(call.see(t), Summed) for t in counts):
            raise Meet
        return call.see(first)
    return pointwise(call)


def multiplying(call: Call) -> Result:
    """A product, in either order."""
    labels = call.labels(call.args)
    if len(labels) == 1 and isinstance(labels[0], Summed):
        return labels[0]
    return pointwise(call)


def unchanged(call: Call) -> Result:
    """The first argument in another type, memory or graph; the others only say which."""
    return call.label


def where(call: Call) -> Result:
    """torch.where(condition, a, b); with the condition alone it picks positions."""
    if len(call.args) + len(call.kwargs) == 1:
        raise Lost
    return pointwise(call)


def renormed(call: Call) -> Result:
    """Each index of one axis scaled by its own norm."""
    call.refuse_others(Meet)
    if call.place[0] != call.axis(2):
        raise Meet
    return call.rows


def searched(call: Call) -> Result:
    """The places of values in sorted sequences, of which each entry of the other axes has one."""
    value, sorted_ = call.argument(1, "input"), call.value
    if call.label is not None and call.place[0] == sorted_.ndim - 1:
        raise Meet
    return _entrywise(call, value, *([sorted_] if call.label is not None else []))


def like(call: Call) -> Result:
    """New contents: in the shape of the first argument they may as well have its rows."""
    label = call.label
    rows = isinstance(label, Rows) and label.count != 1
    return label if rows and call.out.shape == call.value.shape else None


def along(at: int, default: Any = None, name: str = "dim", linear: bool = False) -> Family:
    """A reduction or scan along the axes in argument `at`; None stands for all of them."""

    def family(call: Call) -> Result:
        value, label = call.value, call.label
        if linear and isinstance(label, Summed):
            return label
        call.refuse_others(Lost)
        rows = rows_of(label)
        dims = call.argument(at, name, default)
        if dims is None and "axis" in call.kwargs:
            dims = call.kwargs["axis"]
        if isinstance(dims, Tensor):
            raise Lost
        if dims is None or isinstance(dims, bool):
            dims = range(value.ndim)
        dims = {from_front(d, value.ndim) for d in ([dims] if isinstance(dims, int) else dims)}
        if not dims:
            dims = set(range(value.ndim))
        axis, inner = call.place
        if axis in dims:
            if linear and rows.order is None:
                return SUMMED
            raise Meet
        before = sum(d < axis for d in dims) if call.result.ndim < value.ndim else 0
        return call.stays(axis - before, inner)

    return family


def quantile(call: Call) -> Result:
    """The quantile along an axis. Several of them are on an axis of their own."""
    label = _over_axis_2(call)
    if getattr(call.argument(1, "q"), "ndim", 0):
        raise Lost
    return label


_over_axis_2 = along(2)


def extreme(call: Call) -> Result:
    """max and min: of two tensors entry by entry, or along an axis."""
    args = call.args
    two = len(args) > 1 and isinstance(args[1], Tensor) and isinstance(call.out, Tensor)
    return pointwise(call) if two else _over_axis_1(call)


_over_axis_1 = along(1)


def compared(call: Call) -> Result:
    """Two tensors compared along an axis, which is gone afterwards: cosine_similarity."""
    left, right = call.args[:2]
    shape = torch.broadcast_shapes(left.shape, right.shape)
    dim = from_front(call.argument(2, "dim", 1), len(shape))
    rows = agreed(
        [
            aligned(label, t.shape, shape)
            for t in (left, right)
            if (label := call.see(t)) is not None
        ]
    )
    axis, inner = place_of(rows, shape)
    if axis == dim:
        raise Meet
    return rows.at(call.out.shape, axis - (dim < axis), inner)


def matrices(call: Call) -> Result:
    """Functions of the matrices in the last two axes."""
    call.refuse_others(Lost)
    axis, inner = call.place
    if axis >= call.value.ndim - 2:
        raise Meet
    return [call.stays(axis, inner, t) for t in tensors_in(call.out)]


def trailing(call: Call) -> Result:
    """A normalisation over the last axes that argument 1 lists."""
    count = len(call.argument(1, "normalized_shape"))
    call.refuse_others(Meet)
    if call.place[0] >= call.value.ndim - count:
        raise Meet
    return call.rows


def leading(call: Call) -> Result:
    """An operation on each entry of the first axis by itself: convolutions, pools, resizing."""
    call.refuse_others(Meet)  # a kernel or a weight that rows have made
    return _leading(call)


def _leading(call: Call) -> Rows:
    value, shape = call.value, call.result.shape
    axis, inner = call.place
    if axis != 0 or shape[0] != value.shape[0] or value.ndim < 2:
        raise Meet
    return call.stays(0, inner)


def convolved(call: Call) -> Result:
    """A convolution by a constant kernel. Without an axis of rows the first is the channels'."""
    if call.value.ndim != call.argument(1, "weight").ndim:
        raise Meet
    return leading(call)


def leading_pair(call: Call) -> Result:
    """The same with a second argument by row: the grid of grid_sample, the state of a cell."""
    rows = _leading(call)
    for other in tensors_in(call.args[1]):
        if (label := call.see(other)) is not None:
            axis, inner = place_of(label, other.shape)
            if axis != 0 or other.shape[0] != call.value.shape[0]:
                raise Meet
            agreed([rows, rows_of(label).at(call.result.shape, 0, inner)])
    call.refuse_others(Meet, first=2)
    return rows


def first_alone(call: Call) -> Result:
    """Pointwise in the first argument, with constants that have other shapes: prelu, bucketize."""
    call.refuse_others(Meet)
    return _entrywise(call, call.value)


def batch_norm(call: Call) -> Result:
    """With given statistics it is pointwise; with the batch's own the examples meet."""
    if call.argument(5, "training", False):
        raise Meet
    return leading(call)


def sort(call: Call) -> Result:
    """Along another axis each row is sorted by itself. One number per row: the rows are put in
    order, which the indices tell."""
    value, rows = call.value, call.rows
    place = rows.place(value.shape)
    if place is None or place[0] != call.axis(1, -1):
        return _sorted_along(call)
    if value.ndim != 1 or isinstance(call.out, Tensor):
        raise Meet
    owners = rows.owners(value.shape, 0, place[1], value.device)
    return [Rows(1, rows.batch, owners[call.out[1]]), Meeting("'sort'")]


_sorted_along = along(1, -1)


def taken(call: Call) -> Result:
    """Entries of a constant, one for every index."""
    if call.label is not None:
        raise Lost
    return _entrywise(call, call.args, call.kwargs)


def gather(call: Call) -> Result:
    """Entries picked along one axis, by indices of the same number of axes."""
    if call.label is None:  # of a constant, such as a table: each belongs to the row of its index
        return _entrywise(call, call.args, call.kwargs)
    return scatter(call)


def filled(call: Call) -> Result:
    """Entries of a source, one after the other, at places that are anywhere."""
    if call.labels(call.args[2:], call.kwargs):
        raise Meet
    return _entrywise(call, call.args)


def scatter(call: Call) -> Result:
    """Entries picked or put along one axis, by indices of the same number of axes."""
    value, out, dim = call.value, call.out, call.argument(1, "dim")
    if not isinstance(dim, int):  # take_along_dim(input, indices, dim)
        dim = call.argument(2, "dim")
    if not isinstance(dim, int):
        raise Lost
    dim = from_front(dim, value.ndim)

    def where(tensor: Tensor, axis: int) -> int:
        if tensor.ndim != value.ndim or axis == dim or tensor.shape[axis] != out.shape[axis]:
            raise Meet
        return axis

    return call.joint((call.args, call.kwargs), where)


def entrywise_loss(call: Call) -> Result:
    """A loss of each entry and its target, which are broadcast to one shape; or of all their
    entries along the last axis, their sum or their mean."""
    if call.labels(call.args[2:], [v for k, v in call.kwargs.items() if k != "target"]):
        raise Meet  # weights that rows have made: a mean divides by all of them
    return _each_loss(call, call.value, call.argument(1, "target"))


def binary_loss(call: Call) -> Result:
    """The same with weights that rows may have made: their own loss is multiplied, and no more."""
    return _each_loss(call, *tensors_in((call.args, call.kwargs)))


def _each_loss(call: Call, value: Tensor, target: Tensor, *weights: Tensor) -> Result:
    out, shape = call.result, torch.broadcast_shapes(value.shape, target.shape)
    given = [(t.shape, call.see(t)) for t in (value, target, *weights)]
    rows = agreed([aligned(label, size, shape) for size, label in given if label is not None])
    if out.ndim == 0:
        if rows.order is not None:
            raise Meet
        return SUMMED
    axis, inner = place_of(rows, shape)
    if axis >= out.ndim:
        raise Meet
    return rows.at(out.shape, axis, inner)


def loss(call: Call) -> Result:
    """A loss of scores and classes: one number for each target, their sum or their mean."""
    value, out, target = call.value, call.out, call.argument(1, "target")
    if call.labels(call.args[2:], [v for k, v in call.kwargs.items() if k != "target"]):
        raise Meet  # weights that rows have made
    labels = []
    for tensor in (value, target):
        label = call.see(tensor)
        if label is None:
            continue
        rows = rows_of(label)
        if rows.order is not None and not out.ndim:
            raise Meet
        axis, inner = place_of(rows, tensor.shape)
        if axis == min(1, value.ndim - 1) and (tensor is value or value.ndim == target.ndim):
            raise Meet  # the classes
        labels.append(rows.at((tensor.shape[axis],), 0, inner))
    agreed(labels)
    if out.ndim == 0:
        return SUMMED
    axis, inner = call.place
    return call.stays(axis - (axis > 1 and out.ndim < value.ndim), inner)
