"""Operations entry by entry, along an axis, on each entry of the first axis, and losses."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vestige.gradients.following.base import (
    SUMMED,
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
    labels_of,
    place_of,
    rows_of,
)
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Meeting, Rows, Summed


def pointwise(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Each entry of the result depends on the entries of the arguments in its place."""
    results = list(tensors_in(out))
    shape = results[0].shape
    found: list[Rows] = []
    for value in (*args, *kwargs.values()):
        for tensor in tensors_in(value):
            label = see(tensor)
            if label is not None:
                found.append(aligned(rows_of(label), tensor.shape, shape))
    return agreed(found)


def linear_pointwise(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Pointwise and linear: a sum over rows times a constant, or plus another, stays a sum."""
    labels = labels_of(see, (args, kwargs))
    if labels and all(isinstance(label, Summed) for label in labels):
        return labels[0]
    return pointwise(see, args, kwargs, out)


def scaling(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A product or quotient: a sum over rows may be multiplied with one constant."""
    first, *others = args
    if isinstance(first, Tensor) and isinstance(see(first), Summed):
        counts = [t for t in tensors_in((others, kwargs)) if see(t) is not None]
        # A mean by hand, sum / count: whoever reads the loss puts a fixed count in its place.
        if any(t.requires_grad or not isinstance(see(t), Summed) for t in counts):
            raise Meet
        return see(first)
    return pointwise(see, args, kwargs, out)


def multiplying(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A product, in either order."""
    labels = labels_of(see, args)
    if len(labels) == 1 and isinstance(labels[0], Summed):
        return labels[0]
    return pointwise(see, args, kwargs, out)


def unchanged(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The first argument in another type, memory or graph; the others only say which."""
    return see(args[0])


def where(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """torch.where(condition, a, b); with the condition alone it picks positions."""
    if len(args) + len(kwargs) == 1:
        raise Lost
    return pointwise(see, args, kwargs, out)


def like(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """New contents: in the shape of the first argument they may as well have its rows."""
    label = see(args[0])
    return label if isinstance(label, Rows) and out.shape == args[0].shape else None


def along(at: int, default: Any = None, name: str = "dim", linear: bool = False) -> Family:
    """A reduction or scan along the axes in argument `at`; None stands for all of them."""

    def family(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
        value = args[0]
        label = see(value)
        if linear and isinstance(label, Summed):
            return label
        if labels_of(see, (args[1:], kwargs)):
            raise Lost
        rows = rows_of(label)
        dims = argument(args, kwargs, at, name, default)
        if dims is None and "axis" in kwargs:
            dims = kwargs["axis"]
        if isinstance(dims, Tensor):
            raise Lost
        if dims is None or isinstance(dims, bool):
            dims = range(value.ndim)
        dims = {from_front(d, value.ndim) for d in ([dims] if isinstance(dims, int) else dims)}
        if not dims:
            dims = set(range(value.ndim))
        axis, inner = place_of(rows, value.shape)
        if axis in dims:
            if linear and rows.order is None:
                return SUMMED
            raise Meet
        shape = next(tensors_in(out)).shape
        before = sum(d < axis for d in dims) if len(shape) < value.ndim else 0
        return rows.at(shape, axis - before, inner)

    return family


def extreme(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """max and min: of two tensors entry by entry, or along an axis."""
    two = len(args) > 1 and isinstance(args[1], Tensor) and isinstance(out, Tensor)
    return (pointwise if two else along(1))(see, args, kwargs, out)


def compared(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Two tensors compared along an axis, which is gone afterwards: cosine_similarity."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    dim = from_front(argument(args, kwargs, 2, "dim", 1), len(shape))
    found = [
        aligned(rows_of(label), t.shape, shape) for t in args[:2] if (label := see(t)) is not None
    ]
    rows = agreed(found)
    axis, inner = place_of(rows, shape)
    if axis == dim:
        raise Meet
    return rows.at(out.shape, axis - (dim < axis), inner)


def matrices(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Functions of the matrices in the last two axes."""
    value, rows = args[0], rows_of(see(args[0]))
    if labels_of(see, (args[1:], kwargs)):
        raise Lost
    axis, inner = place_of(rows, value.shape)
    if axis >= value.ndim - 2:
        raise Meet
    return [rows.at(t.shape, axis, inner) for t in tensors_in(out)]


def trailing(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A normalisation over the last axes that argument 1 lists."""
    value, count = args[0], len(argument(args, kwargs, 1, "normalized_shape"))
    if labels_of(see, (args[1:], kwargs)):
        raise Meet
    rows = rows_of(see(value))
    if place_of(rows, value.shape)[0] >= value.ndim - count:
        raise Meet
    return rows


def leading(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """An operation on each entry of the first axis by itself: convolutions, pools, resizing."""
    value, shape = args[0], next(tensors_in(out)).shape
    if labels_of(see, (args[1:], kwargs)):
        raise Meet  # a kernel or a weight that rows have made
    rows = rows_of(see(value))
    axis, inner = place_of(rows, value.shape)
    if axis != 0 or shape[0] != value.shape[0] or value.ndim < 2:
        raise Meet
    return rows.at(shape, 0, inner)


def convolved(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A convolution by a constant kernel. Without an axis of rows the first is the channels'."""
    if args[0].ndim != argument(args, kwargs, 1, "weight").ndim:
        raise Meet
    return leading(see, args, kwargs, out)


def leading_pair(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The same with a second argument by row: the grid of grid_sample, the state of a cell."""
    label = leading(see, args[:1], {}, out)
    assert isinstance(label, Rows)
    shape = next(tensors_in(out)).shape
    for other in tensors_in(args[1]):
        if (also := see(other)) is not None:
            axis, inner = place_of(also, other.shape)
            if axis != 0 or other.shape[0] != args[0].shape[0]:
                raise Meet
            agreed([label, rows_of(also).at(shape, 0, inner)])
    if labels_of(see, (args[2:], kwargs)):
        raise Meet
    return label


def first_alone(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Pointwise in the first argument, with constants that have other shapes: prelu, bucketize."""
    if labels_of(see, (args[1:], kwargs)):
        raise Meet
    return pointwise(see, args[:1], {}, out)


def batch_norm(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """With given statistics it is pointwise; with the batch's own the examples meet."""
    if argument(args, kwargs, 5, "training", False):
        raise Meet
    return leading(see, args, kwargs, out)


def sort(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Along another axis each row is sorted by itself. One number per row: the rows are put in
    order, which the indices tell."""
    value, rows = args[0], rows_of(see(args[0]))
    dim = from_front(argument(args, kwargs, 1, "dim", -1), value.ndim)
    place = rows.place(value.shape)
    if place is None or place[0] != dim:
        return along(1, -1)(see, args, kwargs, out)
    if value.ndim != 1 or isinstance(out, Tensor):
        raise Meet
    owners = rows.owners(value.shape, 0, place[1], value.device)
    return [Rows(1, rows.batch, owners[out[1]]), Meeting("'sort'")]


def gather(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Entries picked or put along one axis, by indices of the same number of axes."""
    value, dim = args[0], argument(args, kwargs, 1, "dim")
    if not isinstance(dim, int):  # take_along_dim(input, indices, dim)
        dim = argument(args, kwargs, 2, "dim")
    if not isinstance(dim, int):
        raise Lost
    dim = from_front(dim, value.ndim)
    tensors = [t for t in tensors_in((args, kwargs)) if see(t) is not None]
    found = []
    for tensor in tensors:
        rows = rows_of(see(tensor))
        axis, inner = place_of(rows, tensor.shape)
        if tensor.ndim != value.ndim or axis == dim or tensor.shape[axis] != out.shape[axis]:
            raise Meet
        found.append(rows.at(out.shape, axis, inner))
    return agreed(found)


def loss(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A loss of input and target: one number for each target, their sum or their mean."""
    value, target = args[0], argument(args, kwargs, 1, "target")
    if labels_of(see, (args[2:], [v for k, v in kwargs.items() if k != "target"])):
        raise Meet  # weights that rows have made
    found = []
    for tensor in (value, target):
        label = see(tensor)
        if label is None:
            continue
        rows = rows_of(label)
        if rows.order is not None:
            raise Meet
        if rows.count > 1:
            axis, inner = place_of(rows, tensor.shape)
            if axis == 1 and tensor is value and value.ndim != target.ndim:
                raise Meet  # the classes
            found.append(rows.at((tensor.shape[axis],), 0, inner))
    if found:
        agreed(found)
    if out.ndim == 0:
        return SUMMED
    rows = rows_of(see(value))
    axis, inner = place_of(rows, value.shape)
    return rows.at(out.shape, axis - (axis > 1 and out.ndim < value.ndim), inner)
