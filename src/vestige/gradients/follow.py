"""How torch's operations move the rows of the batch: the label of a result from its arguments.

Each function below covers a family of operations (pointwise, along an axis, moving entries,
products) by name. An operation that no family names gives a result whose rows are lost; it is
refused where a parameter or the loss would meet it.

Guarantee: a result is labelled `Rows` only if each of its entries depends on the one row that the
label says, for any contents. (What the position in the lot does to an entry, such as a constant
that differs from row to row, no label tells: the self-check compares rows with rows alone.)
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Meeting, Rows, Summed

See = Callable[[Tensor], Label | None]
Result = Label | None | list[Label | None]
Args = tuple[Any, ...]
Family = Callable[[See, Args, dict[str, Any], Any], Result]

# (axis, inner) with the rows: where they are in a result.
Place = tuple[int, int]

_SUMMED = Summed()  # to be named after the operation


class Lost(Exception):  # noqa: N818 - it is caught where the label is made
    """The family does not cover this call; its argument may say why."""


class Meet(Exception):  # noqa: N818
    """Rows meet in this call."""


def follow(
    func: Any, labels: Mapping[int, Label], args: Args, kwargs: dict[str, Any], out: Any
) -> Result:
    """The label of what `func(*args, **kwargs)` gave, or one for each tensor in it.

    `labels` has those of the arguments, by their identity, at least one.
    """

    def see(tensor: Tensor) -> Label | None:
        return labels.get(id(tensor))

    family = FAMILIES.get(name_of(func))
    try:
        ones = [x for x in labels.values() if isinstance(x, Rows) and x.count == 1]
        if ones and family is not like:
            # Whatever is made of one row belongs to it; with others it makes a meeting.
            if len(ones) < len(labels):
                raise Meet
            return _agreed(ones)
        if family is None:
            raise Lost
        found = family(see, args, kwargs, out)
        return Summed(f"{name_of(func)!r}") if found is _SUMMED else found
    except (Lost, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = f" ({error})" if isinstance(error, Lost) and error.args else ""
        return _carried_on(labels.values()) or Meeting(f"{name_of(func)!r}{why}", lost=True)
    except Meet:
        return _carried_on(labels.values()) or Meeting(f"{name_of(func)!r}")


def name_of(func: Any) -> str:
    """The name of an operation, of the property that is read, or of an overload without its end."""
    if func is F.unfold:  # Tensor.unfold is another operation
        return "im2col"
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f".{func.__self__.__name__}"
    return name.partition(".")[0] if getattr(func, "__module__", "") == "torch._ops.aten" else name


def _labels(see: See, values: Iterable[Any]) -> list[Label]:
    return [label for t in tensors_in(list(values)) if (label := see(t)) is not None]


def _carried_on(labels: Iterable[Label]) -> Meeting | None:
    """A meeting among the arguments says more than the operation after it."""
    found = [x for x in labels if isinstance(x, Meeting)]
    found += [Meeting(x.what) for x in labels if isinstance(x, Summed)]
    return next((m for m in found if not m.lost), found[0] if found else None)


def _rows(label: Label | None) -> Rows:
    if not isinstance(label, Rows):
        raise Meet if isinstance(label, Summed) or not getattr(label, "lost", True) else Lost
    return label


def _place(label: Label | None, shape: Sequence[int]) -> Place:
    place = _rows(label).place(shape)
    if place is None:
        raise Lost
    return place


def _agreed(labels: Sequence[Rows]) -> Rows:
    """The one label of a result that several arguments give rows to."""
    first = labels[0]
    if not all(first.same(other) for other in labels[1:]):
        raise Meet
    return first


def _arg(args: Args, kwargs: dict[str, Any], at: int, name: str, default: Any = None) -> Any:
    return kwargs[name] if name in kwargs else args[at] if len(args) > at else default


def _axis(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


def _aligned(label: Rows, shape: Sequence[int], out: Sequence[int]) -> Rows:
    """The rows of an argument that is broadcast to the shape `out`."""
    if label.count == 1 or list(shape) == list(out):
        return label
    axis, inner = _place(label, shape)
    after = axis + len(out) - len(shape)
    if after < 0 or out[after] != shape[axis]:
        raise Lost
    return label.at(out, after, inner)


# -- pointwise ----------------------------------------------------------------------------------


def pointwise(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Each entry of the result depends on the entries of the arguments in its place."""
    results = list(tensors_in(out))
    shape = results[0].shape
    found: list[Rows] = []
    for value in (*args, *kwargs.values()):
        for tensor in tensors_in(value):
            label = see(tensor)
            if label is not None:
                found.append(_aligned(_rows(label), tensor.shape, shape))
    return _agreed(found)


def linear_pointwise(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Pointwise and linear: a sum over rows times a constant, or plus another, stays a sum."""
    labels = _labels(see, (args, kwargs))
    if labels and all(isinstance(label, Summed) for label in labels):
        return labels[0]
    return pointwise(see, args, kwargs, out)


def scaling(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A product or quotient: a sum over rows may be multiplied with one constant."""
    first, *others = args
    if isinstance(first, Tensor) and isinstance(see(first), Summed):
        if _labels(see, (others, kwargs)):
            raise Meet
        return see(first)
    return pointwise(see, args, kwargs, out)


def multiplying(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A product, in either order."""
    labels = _labels(see, args)
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


# -- along an axis ------------------------------------------------------------------------------


def along(at: int, default: Any = None, name: str = "dim", linear: bool = False) -> Family:
    """A reduction or scan along the axes in argument `at`; None stands for all of them."""

    def family(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
        value = args[0]
        if len(args) > 1 and isinstance(args[1], Tensor):  # torch.max(a, b)
            return pointwise(see, args, kwargs, out)
        label = see(value)
        if linear and isinstance(label, Summed):
            return label
        if _labels(see, (args[1:], kwargs)):
            raise Lost
        rows = _rows(label)
        dims = _arg(args, kwargs, at, name, default)
        if dims is None and "axis" in kwargs:
            dims = kwargs["axis"]
        if dims is None or isinstance(dims, bool):
            dims = range(value.ndim)
        dims = {_axis(d, value.ndim) for d in ([dims] if isinstance(dims, int) else dims)}
        if not dims:
            dims = set(range(value.ndim))
        axis, inner = _place(rows, value.shape)
        if axis in dims:
            if linear and rows.order is None:
                return _SUMMED
            raise Meet
        shape = next(tensors_in(out)).shape
        before = sum(d < axis for d in dims) if len(shape) < value.ndim else 0
        return rows.at(shape, axis - before, inner)

    return family


def compared(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Two tensors compared along an axis, which is gone afterwards: cosine_similarity."""
    shape = torch.broadcast_shapes(args[0].shape, args[1].shape)
    dim = _axis(_arg(args, kwargs, 2, "dim", 1), len(shape))
    found = [
        _aligned(_rows(label), t.shape, shape) for t in args[:2] if (label := see(t)) is not None
    ]
    rows = _agreed(found)
    axis, inner = _place(rows, shape)
    if axis == dim:
        raise Meet
    return rows.at(out.shape, axis - (dim < axis), inner)


def matrices(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Functions of the matrices in the last two axes."""
    value, rows = args[0], _rows(see(args[0]))
    if _labels(see, (args[1:], kwargs)):
        raise Lost
    axis, inner = _place(rows, value.shape)
    if axis >= value.ndim - 2:
        raise Meet
    return [rows.at(t.shape, axis, inner) for t in tensors_in(out)]


def trailing(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A normalisation over the last axes that argument 1 lists."""
    value, count = args[0], len(_arg(args, kwargs, 1, "normalized_shape"))
    if _labels(see, (args[1:], kwargs)):
        raise Meet
    rows = _rows(see(value))
    if _place(rows, value.shape)[0] >= value.ndim - count:
        raise Meet
    return rows


def leading(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """An operation on each entry of the first axis by itself: convolutions, pools, resizing."""
    value, shape = args[0], next(tensors_in(out)).shape
    if _labels(see, (args[1:], kwargs)):
        raise Meet  # a kernel or a weight that rows have made
    rows = _rows(see(value))
    axis, inner = _place(rows, value.shape)
    if axis != 0 or shape[0] != value.shape[0] or value.ndim < 2:
        raise Meet
    return rows.at(shape, 0, inner)


def leading_pair(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The same with a second argument by row: the grid of grid_sample, the state of a cell."""
    label = leading(see, args[:1], {}, out)
    assert isinstance(label, Rows)
    shape = next(tensors_in(out)).shape
    for other in tensors_in(args[1]):
        if (also := see(other)) is not None:
            axis, inner = _place(also, other.shape)
            if axis != 0 or other.shape[0] != args[0].shape[0]:
                raise Meet
            _agreed([label, _rows(also).at(shape, 0, inner)])
    if _labels(see, (args[2:], kwargs)):
        raise Meet
    return label


def first_alone(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Pointwise in the first argument, with constants that have other shapes: prelu, bucketize."""
    if _labels(see, (args[1:], kwargs)):
        raise Meet
    return pointwise(see, args[:1], {}, out)


def batch_norm(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """With given statistics it is pointwise; with the batch's own the examples meet."""
    if _arg(args, kwargs, 5, "training", False):
        raise Meet
    return leading(see, args, kwargs, out)


def sort(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Along another axis each row is sorted by itself. One number per row: the rows are put in
    order, which the indices tell."""
    value, rows = args[0], _rows(see(args[0]))
    dim = _axis(_arg(args, kwargs, 1, "dim", -1), value.ndim)
    place = rows.place(value.shape)
    if place is None or place[0] != dim:
        return along(1, -1)(see, args, kwargs, out)
    if value.ndim != 1 or isinstance(out, Tensor):
        raise Meet
    owners = rows.owners(value.shape, 0, place[1], value.device)
    return [Rows(1, rows.batch, owners[out[1]]), Meeting("'sort'")]


def gather(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Entries picked or put along one axis, by indices of the same number of axes."""
    value, dim = args[0], _axis(_arg(args, kwargs, 1, "dim"), args[0].ndim)
    tensors = [t for t in tensors_in((args, kwargs)) if see(t) is not None]
    found = []
    for tensor in tensors:
        rows = _rows(see(tensor))
        axis, inner = _place(rows, tensor.shape)
        if tensor.ndim != value.ndim or axis == dim or tensor.shape[axis] != out.shape[axis]:
            raise Meet
        found.append(rows.at(out.shape, axis, inner))
    return _agreed(found)


# -- moving entries -----------------------------------------------------------------------------


def reshaped(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The same entries in the same order."""
    label = see(args[0])
    if isinstance(label, Rows) and next(tensors_in(out)).numel() != args[0].numel():
        raise Lost
    return label


def complex_pairs(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A last axis of two numbers becomes one complex number, or the other way round."""
    value, rows = args[0], _rows(see(args[0]))
    axis, inner = _place(rows, value.shape)
    if axis >= min(value.ndim, out.ndim):
        raise Lost
    return rows.at(out.shape, axis, inner)


def appended(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Each entry becomes a vector: one_hot."""
    rows = _rows(see(args[0]))
    return Rows(rows.stride * out.shape[-1], rows.batch, rows.order)


def permuted(axes: Callable[[Args, dict[str, Any], int], Sequence[int]]) -> Family:
    """Axes in another order: `axes` says which old axis each new one is."""

    def family(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
        value, rows = args[0], see(args[0])
        if not isinstance(rows, Rows):
            return rows
        axis, inner = _place(rows, value.shape)
        order = [_axis(a, value.ndim) for a in axes(args, kwargs, value.ndim)]
        return rows.at(out.shape, order.index(axis), inner)

    return family


def _permute(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    dims = kwargs["dims"] if "dims" in kwargs else args[1:]
    return dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims


def _transpose(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    a = _arg(args, kwargs, 1, "dim0", kwargs.get("axis0"))
    b = _arg(args, kwargs, 2, "dim1", kwargs.get("axis1"))
    order = list(range(ndim))
    order[a], order[b] = order[b], order[a]
    return order


def _reversed(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    return range(ndim - 1, -1, -1)


def _last_two(args: Args, kwargs: dict[str, Any], ndim: int) -> Sequence[int]:
    return [*range(ndim - 2), ndim - 1, ndim - 2]


def movedim(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """torch.movedim, by moving the numbers of the axes in the same way."""
    value, rows = args[0], see(args[0])
    if not isinstance(rows, Rows):
        return rows
    axis, inner = _place(rows, value.shape)
    # Axis i of the probe has i + 1 entries, so that its shape tells the new order.
    probe = torch.empty(range(1, value.ndim + 1), device="meta").movedim(*args[1:], **kwargs)
    return rows.at(out.shape, list(probe.shape).index(axis + 1), inner)


def expanded(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """expand, broadcast_to: aligned on the right."""
    return _aligned(_rows(see(args[0])), args[0].shape, out.shape)


def broadcast(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """broadcast_tensors: each by itself."""
    given = args[0] if len(args) == 1 and not isinstance(args[0], Tensor) else args
    return [
        None if (label := see(t)) is None else _aligned(_rows(label), t.shape, wide.shape)
        for t, wide in zip(given, out, strict=True)
    ]


def repeated(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """repeat and tile: whole blocks one after the other."""
    value, rows = args[0], _rows(see(args[0]))
    axis, inner = _place(rows, value.shape)
    return rows.at(out.shape, axis + out.ndim - value.ndim, inner)


def interleaved(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """repeat_interleave by a number."""
    value, rows = args[0], _rows(see(args[0]))
    times, dim = _arg(args, kwargs, 1, "repeats"), _arg(args, kwargs, 2, "dim")
    if dim is None or not isinstance(times, int):
        raise Lost
    axis, inner = _place(rows, value.shape)
    return rows.at(out.shape, axis, inner * times if _axis(dim, value.ndim) == axis else inner)


def joined(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """cat along an axis. Along the rows' own axis the rows of all parts follow each other."""
    parts = list(_arg(args, kwargs, 0, "tensors"))
    dim = _axis(_arg(args, kwargs, 1, "dim", kwargs.get("axis", 0)), out.ndim)
    # An empty tensor of one axis is passed over by torch.
    parts = [t for t in parts if t.shape != (0,) or out.ndim == 1]
    found = [(t, _rows(label)) for t in parts if (label := see(t)) is not None]
    places = {_place(rows, t.shape) for t, rows in found}
    if len(places) != 1:
        raise Meet
    axis, inner = next(iter(places))
    if axis != dim:
        return _agreed([rows.at(out.shape, axis, inner) for _, rows in found])
    if len(found) < len(parts):  # a constant among the rows belongs to nobody
        raise Meet
    if all(rows.same(found[0][1]) for _, rows in found):
        return found[0][1].at(out.shape, axis, inner)
    owners = [rows.owners(t.shape, axis, inner, out.device) for t, rows in found]
    return _ordered(torch.cat(owners), out.shape, axis, found[0][1].batch)


def stacked(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """stack on a new axis."""
    parts = list(_arg(args, kwargs, 0, "tensors"))
    dim = _axis(_arg(args, kwargs, 1, "dim", 0), out.ndim)
    found = []
    for t in parts:
        if (label := see(t)) is not None:
            rows = _rows(label)
            axis, inner = _place(rows, t.shape)
            found.append(rows.at(out.shape, axis + (dim <= axis), inner))
    return _agreed(found)


def split(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Parts along an axis, in order: split, chunk, tensor_split."""
    value, rows = args[0], _rows(see(args[0]))
    dim = _axis(_arg(args, kwargs, 2, "dim", 0), value.ndim)
    labels: list[Label | None] = []
    start = 0
    for part in out:
        labels.append(_sliced(rows, value, dim, slice(start, start + part.shape[dim]), part))
        start += part.shape[dim]
    return labels


def unbound(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Every index of an axis by itself."""
    value, rows = args[0], _rows(see(args[0]))
    dim = _axis(_arg(args, kwargs, 1, "dim", 0), value.ndim)
    return [_selected(rows, value, dim, i, part) for i, part in enumerate(out)]


def selected(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """One index of an axis."""
    value, rows = args[0], _rows(see(args[0]))
    dim = _axis(_arg(args, kwargs, 1, "dim"), value.ndim)
    return _selected(rows, value, dim, _arg(args, kwargs, 2, "index"), out)


def narrowed(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A stretch of an axis."""
    value, rows = args[0], _rows(see(args[0]))
    dim = _axis(_arg(args, kwargs, 1, "dim"), value.ndim)
    start = _axis(_arg(args, kwargs, 2, "start"), value.shape[dim])
    if not isinstance(start, int):
        raise Lost
    return _sliced(rows, value, dim, slice(start, start + out.shape[dim]), out)


def flipped(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Axes backwards."""
    value, rows = args[0], _rows(see(args[0]))
    dims = kwargs["dims"] if "dims" in kwargs else args[1:]
    dims = dims[0] if len(dims) == 1 and not isinstance(dims[0], int) else dims
    axis, inner = _place(rows, value.shape)
    if axis not in {_axis(d, value.ndim) for d in dims}:
        return rows
    return _ordered(
        rows.owners(value.shape, axis, inner, value.device).flip(0), out.shape, axis, rows.count
    )


def rolled(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Axes turned round."""
    value, rows = args[0], _rows(see(args[0]))
    shifts, dims = _arg(args, kwargs, 1, "shifts"), _arg(args, kwargs, 2, "dims")
    if dims is None:
        raise Lost
    shifts = [shifts] if isinstance(shifts, int) else list(shifts)
    dims = [dims] if isinstance(dims, int) else [_axis(d, value.ndim) for d in dims]
    axis, inner = _place(rows, value.shape)
    owners = rows.owners(value.shape, axis, inner, value.device)
    moved = [s for s, d in zip(shifts, dims, strict=True) if _axis(d, value.ndim) == axis]
    return _ordered(owners.roll(sum(moved)), out.shape, axis, rows.batch) if moved else rows


def padded(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """F.pad of other axes than the rows'."""
    value, rows = args[0], _rows(see(args[0]))
    axis, inner = _place(rows, value.shape)
    if out.shape[axis] != value.shape[axis]:
        raise Meet
    pads = list(_arg(args, kwargs, 1, "pad"))
    at = 2 * (value.ndim - 1 - axis)
    if any(pads[at : at + 2]):  # one entry fewer on one side and one more on the other
        raise Meet
    return rows.at(out.shape, axis, inner)


def unfolded(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Tensor.unfold(dim, size, step): windows along one axis, on a new last one."""
    value, rows = args[0], _rows(see(args[0]))
    axis, inner = _place(rows, value.shape)
    if len(args) < 4 or _axis(_arg(args, kwargs, 1, "dimension"), value.ndim) == axis:
        raise Lost
    return rows.at(out.shape, axis, inner)


def _ordered(owners: Tensor, shape: Sequence[int], axis: int, batch: int) -> Rows:
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
    axis, inner = _place(rows, value.shape)
    if axis != dim:
        return rows.at(out.shape, axis, inner)
    start, stop, step = part.indices(value.shape[axis])
    whole = inner * rows.count
    if start % whole == 0 and step == 1 and (stop - start) % whole == 0 and stop > start:
        return rows.at(out.shape, axis, inner)
    owners = rows.owners(value.shape, axis, inner, value.device)[part]
    return _ordered(owners, out.shape, axis, rows.batch)


def _selected(rows: Rows, value: Tensor, dim: int, index: Any, out: Tensor) -> Rows:
    """One index of one axis, which is then gone."""
    axis, inner = _place(rows, value.shape)
    if axis != dim:
        return rows.at(out.shape, axis - (dim < axis), inner)
    owners = rows.owners(value.shape, axis, inner, value.device)
    return Rows(1, rows.batch, owners[index].reshape(1))


def index_selected(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """index_select: other axes freely, the rows' own by reordering."""
    value, rows = args[0], _rows(see(args[0]))
    dim = _axis(_arg(args, kwargs, 1, "dim"), value.ndim)
    index: list[Any] = [slice(None)] * value.ndim
    index[dim] = _arg(args, kwargs, 2, "index")
    return _indexed(see, rows, value, index, out)


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
    for part in parts:
        if isinstance(part, bool):
            raise Lost
        if part is not None and part is not Ellipsis:
            used += part.ndim if _is_mask(part) else 1
    at = next((i for i, part in enumerate(parts) if part is Ellipsis), len(parts))
    return [*parts[:at], *[slice(None)] * (ndim - used), *parts[at + 1 :]]


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8)


def _indexed(see: See, rows: Rows, value: Tensor, index: Any, out: Tensor) -> Rows:
    parts = _spelled(index, value.ndim)
    arrays = [(i, p) for i, p in enumerate(parts) if isinstance(p, Tensor)]
    listed = any(isinstance(p, list) for p in parts)
    if listed or any(_is_mask(p) for _, p in arrays):
        raise Lost("positions picked by their content: examples differ in number")
    if rows.count == 1:
        for _, part in arrays:
            label = see(part)
            if label is not None and not (isinstance(label, Rows) and label.same(rows)):
                raise Meet
        return rows
    axis, inner = _place(rows, value.shape)
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
    order = owners[picked.to(value.device)].expand(block).reshape(-1)
    suffix = prod(out.shape[first + len(block) :])
    flat = (len(order), suffix)
    label = _ordered(order, flat, 0, rows.batch)
    for i, part in arrays:
        also = see(part) if i != at else None
        if also is not None:
            spread = _rows(also)
            if spread.count > 1:
                where, width = _place(spread, part.shape)
                spread = spread.at(out.shape, where + first + len(block) - part.ndim, width)
            _agreed([label, spread])
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
    return _ordered(owners, out.shape, after, rows.batch)


def _looked_up(see: See, value: Tensor, index: Any, out: Tensor) -> Rows:
    """A constant at places that rows give: each place belongs to its row."""
    parts = _spelled(index, value.ndim)
    arrays = [p for p in parts if isinstance(p, Tensor)]
    if any(_is_mask(p) for p in arrays) or any(isinstance(p, list) for p in parts):
        raise Lost("positions picked by their content: examples differ in number")
    chosen = [i for i, p in enumerate(parts) if isinstance(p, Tensor | int)]
    block = torch.broadcast_shapes(*(p.shape for p in arrays))
    adjacent = chosen[-1] - chosen[0] == len(chosen) - 1
    first = sum(i < chosen[0] for i, _ in enumerate(parts) if i not in chosen) if adjacent else 0
    found = []
    for part in arrays:
        if (label := see(part)) is not None:
            rows = _rows(label)
            if rows.count > 1:
                axis, inner = _place(rows, part.shape)
                rows = rows.at(out.shape, axis + first + len(block) - part.ndim, inner)
            found.append(rows)
    return _agreed(found)


def assigned(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """target[index] = value: the label of the target afterwards."""
    target, index, value = args
    before = see(target)
    if isinstance(before, Meeting | Summed):
        return before
    parts = _spelled(index, target.ndim)
    arrays = [p for p in parts if isinstance(p, Tensor)]
    content = see(value) if isinstance(value, Tensor) else None
    if any(isinstance(p, list) for p in parts):
        raise Lost
    if any(see(p) is not None for p in arrays) or (arrays and content is not None):
        # A mask over the first axes, and a constant: like masked_fill.
        if len(arrays) != 1 or not _is_mask(arrays[0]) or content is not None:
            raise Lost
        if any(p != slice(None) for p in parts if not isinstance(p, Tensor)):
            raise Lost
        mask = arrays[0]
        if parts[0] is not mask:
            raise Lost
        shown = _rows(see(mask))
        where, inner = _place(shown, mask.shape)
        given = shown.at(target.shape, where, inner)
        return given if before is None else _agreed([given, _rows(before)])
    if content is None:
        return before
    rows = _rows(content)
    region = target.detach()[index]
    wanted = _aligned(rows, value.shape[-region.ndim :], region.shape)
    if rows.count == 1:
        return before if before is not None and _rows(before).same(rows) else _give_up()
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


# -- products -----------------------------------------------------------------------------------


def linear(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """x W^T + b with a constant W."""
    value = _arg(args, kwargs, 0, "input")
    if _labels(see, (args[1:], [v for k, v in kwargs.items() if k != "input"])):
        raise Meet
    rows = _rows(see(value))
    axis, inner = _place(rows, value.shape)
    if axis == value.ndim - 1:
        raise Meet
    return rows.at(out.shape, axis, inner)


def _product(see: See, left: Tensor, right: Tensor, out: Tensor) -> list[Rows]:
    """The labels that both factors of a matrix product give its result."""
    found = []
    for value, contracted, other in ((left, -1, right), (right, -2, left)):
        label = see(value)
        if label is None:
            continue
        rows = _rows(label)
        axis, inner = _place(rows, value.shape)
        if value.ndim == 1 or axis == value.ndim + contracted:
            raise Meet
        if other.ndim == 1:
            after = axis if axis < value.ndim - 2 or contracted == -1 else axis - 1
        else:
            after = axis + out.ndim - value.ndim
        if out.shape[after] != value.shape[axis]:
            raise Lost
        found.append(rows.at(out.shape, after, inner))
    return found


def matmul(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Matrix products with any number of batch axes."""
    left, right = (*args, *kwargs.values())[:2]
    return _agreed(_product(see, left, right, out))


def rmatmul(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """other @ self."""
    return _agreed(_product(see, args[1], args[0], out))


def addmm(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """added + left @ right: addmm, baddbmm, addmv."""
    added, left, right = args[:3]
    if any(isinstance(v, Tensor) for v in kwargs.values()):
        raise Lost
    found = _product(see, left, right, out)
    if (label := see(added)) is not None:
        found.append(_aligned(_rows(label), added.shape, out.shape))
    return _agreed(found)


def tensordot(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The last axes of rows with the first of a constant."""
    left, dims = args[0], _arg(args, kwargs, 2, "dims", 2)
    if see(args[1]) is not None or not isinstance(dims, int):
        raise Lost
    rows = _rows(see(left))
    axis, inner = _place(rows, left.shape)
    if axis >= left.ndim - dims:
        raise Meet
    return rows.at(out.shape, axis, inner)


def bilinear(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """x W y + b, the last axes of x and y contracted."""
    if _labels(see, (args[2:], kwargs)):
        raise Lost
    found = []
    for value in args[:2]:
        if (label := see(value)) is not None:
            rows = _rows(label)
            if rows.count > 1:
                axis, inner = _place(rows, value.shape)
                if axis == value.ndim - 1:
                    raise Meet
                rows = rows.at(out.shape, axis, inner)
            found.append(rows)
    return _agreed(found)


def einsum(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The letter of the rows must be in the output."""
    equation, operands = args[0], args[1:]
    if not isinstance(equation, str) or "..." in equation:
        raise Lost
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = inputs.replace(",", "")
        output = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    found = []
    for term, operand in zip(inputs.split(","), operands, strict=True):
        label = see(operand)
        if label is None:
            continue
        rows = _rows(label)
        axis, inner = _place(rows, operand.shape)
        if output.count(term[axis]) != 1 or term.count(term[axis]) != 1:
            raise Meet
        found.append(rows.at(out.shape, output.index(term[axis]), inner))
    return _agreed(found)


def attention(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """scaled_dot_product_attention: the rows are on an axis before the last two of each."""
    result = next(tensors_in(out))
    found = []
    for value in tensors_in((args, kwargs)):
        label = see(value)
        if label is None:
            continue
        rows = _rows(label)
        axis, inner = _place(rows, value.shape)
        after = axis + result.ndim - value.ndim
        if axis >= value.ndim - 2 or result.shape[after] != value.shape[axis]:
            raise Meet
        found.append(rows.at(result.shape, after, inner))
    return _agreed(found)


def embedding(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A row of a constant table for every index."""
    index, table = _arg(args, kwargs, 0, "input"), _arg(args, kwargs, 1, "weight")
    if see(table) is not None:
        raise Meet
    rows = _rows(see(index))
    return Rows(rows.stride * out.shape[-1], rows.batch, rows.order)


def cdist(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Distances between the vectors of two tensors: like a product with the second transposed."""
    left, right = args[:2]
    found = []
    for value, ahead in ((left, 0), (right, 1)):
        if (label := see(value)) is None:
            continue
        rows = _rows(label)
        axis, inner = _place(rows, value.shape)
        if axis == value.ndim - 1:
            raise Meet
        after = axis + out.ndim - value.ndim + (ahead if axis == value.ndim - 2 else 0)
        found.append(rows.at(out.shape, after, inner))
    return _agreed(found)


def recurrent(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A frozen recurrent stack: (output, *last states), states with the rows on axis 1."""
    value, batch_first = args[0], args[-1]
    rows = _rows(see(value))
    if not isinstance(batch_first, bool) or len(args) != 9:
        raise Lost
    axis, inner = _place(rows, value.shape)
    if axis != (0 if batch_first else 1) or value.ndim != 3:
        raise Meet
    for state in tensors_in(args[1]):
        if (label := see(state)) is not None:
            if _place(label, state.shape)[0] != 1:
                raise Meet
            _agreed([_rows(label).at((1, 1), 0, 1), rows.at((1, 1), 0, 1)])
    output, *last = out
    return [rows.at(output.shape, axis, inner), *(rows.at(s.shape, 1, inner) for s in last)]


# -- losses -------------------------------------------------------------------------------------


def loss(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A loss of input and target: one number for each target, their sum or their mean."""
    value, target = args[0], _arg(args, kwargs, 1, "target")
    if _labels(see, (args[2:], [v for k, v in kwargs.items() if k != "target"])):
        raise Meet  # weights that rows have made
    found = []
    for tensor in (value, target):
        label = see(tensor)
        if label is None:
            continue
        rows = _rows(label)
        if rows.order is not None:
            raise Meet
        if rows.count > 1:
            axis, inner = _place(rows, tensor.shape)
            if axis == 1 and tensor is value and value.ndim != target.ndim:
                raise Meet  # the classes
            found.append(rows.at((tensor.shape[axis],), 0, inner))
    if found:
        _agreed(found)
    if out.ndim == 0:
        return _SUMMED
    rows = _rows(see(value))
    axis, inner = _place(rows, value.shape)
    return rows.at(out.shape, axis - (axis > 1 and out.ndim < value.ndim), inner)


# -- the table ----------------------------------------------------------------------------------

_POINTWISE = """
abs absolute sign sgn exp exp2 expm1 log log1p log2 log10 sqrt rsqrt square pow float_power sin cos
tan asin acos atan arcsin arccos arctan sinh cosh tanh asinh acosh atanh sinc sigmoid logit erf erfc
erfinv lgamma digamma polygamma i0 ceil floor round trunc frac fix clamp clip clamp_min clamp_max
hardtanh relu relu6 elu selu celu gelu silu mish softplus softsign tanhshrink hardshrink softshrink
leaky_relu rrelu threshold hardsigmoid hardswish logsigmoid dropout alpha_dropout nan_to_num
reciprocal deg2rad rad2deg isnan isinf isfinite isposinf isneginf signbit bitwise_not logical_not
floor_divide remainder fmod maximum minimum fmax fmin atan2 arctan2 hypot copysign heaviside eq ne
lt le gt ge greater greater_equal less less_equal not_equal isclose logical_and logical_or
logical_xor bitwise_and bitwise_or bitwise_xor bitwise_left_shift bitwise_right_shift ldexp xlogy
logaddexp logaddexp2 lerp addcmul addcdiv masked_fill conj conj_physical resolve_conj angle
__and__ __or__ __xor__ __rand__ __ror__ __rxor__ __iand__ __ior__ __ixor__ __invert__ __pow__
__rpow__ __mod__ __rmod__ __imod__ __floordiv__ __rfloordiv__ __rtruediv__ __rdiv__ __eq__ __ne__
__lt__ __le__ __gt__ __ge__ __lshift__ __rshift__ __ilshift__ __irshift__ __ipow__
copy_ fill_ zero_ normal_ uniform_ bernoulli_ exponential_ bernoulli tanh_ .real .imag special_expit
special_erf
""".split()
_LINEAR = """
add sub subtract rsub neg negative positive __add__ __radd__ __iadd__ __sub__ __rsub__ __isub__
__neg__ __pos__
""".split()
_UNCHANGED = """
to type type_as float double half bfloat16 long int bool short char byte cpu cuda contiguous clone
detach detach_ requires_grad_ .data alias pin_memory
""".split()
_RESHAPED = """
reshape view flatten unflatten squeeze unsqueeze view_as reshape_as ravel atleast_1d atleast_2d
atleast_3d _unsafe_view squeeze_ unsqueeze_
""".split()
_LIKE = """
zeros_like ones_like empty_like full_like rand_like randn_like randint_like
new_zeros new_ones new_empty new_full
""".split()
_LEADING = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d max_pool1d max_pool2d
max_pool3d boolean_dispatch _max_pool1d _max_pool2d _max_pool3d fractional_max_pool2d
avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d lp_pool1d lp_pool2d lp_pool3d
max_pool2d_with_indices max_pool1d_with_indices max_pool3d_with_indices max_unpool1d max_unpool2d
adaptive_max_pool2d_with_indices adaptive_max_pool1d_with_indices
interpolate upsample affine_grid pixel_shuffle pixel_unshuffle channel_shuffle
local_response_norm group_norm instance_norm dropout1d dropout2d dropout3d im2col col2im fold
native_group_norm feature_dropout native_channel_shuffle embedding_bag
""".split()
_LOSSES = """
cross_entropy nll_loss nll_loss_nd mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy
binary_cross_entropy_with_logits kl_div poisson_nll_loss soft_margin_loss
multilabel_soft_margin_loss cross_entropy_loss
""".split()

FAMILIES: dict[str, Family] = {
    **dict.fromkeys(_POINTWISE, pointwise),
    **dict.fromkeys(_LINEAR, linear_pointwise),
    **dict.fromkeys(_UNCHANGED, unchanged),
    **dict.fromkeys(_RESHAPED, reshaped),
    **dict.fromkeys(_LIKE, like),
    **dict.fromkeys(_LEADING, leading),
    **dict.fromkeys(_LOSSES, loss),
    **dict.fromkeys(["mul", "multiply", "__mul__", "__rmul__", "__imul__"], multiplying),
    **dict.fromkeys(["div", "divide", "true_divide", "__truediv__", "__itruediv__"], scaling),
    **dict.fromkeys(
        "grid_sample lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell".split(), leading_pair
    ),
    **dict.fromkeys(["prelu", "bucketize"], first_alone),
    "where": where,
    "batch_norm": batch_norm,
    **dict.fromkeys(["layer_norm", "rms_norm"], trailing),
    **dict.fromkeys(["sum", "mean", "nansum", "nanmean"], along(1, linear=True)),
    **dict.fromkeys(
        "amax amin max min prod std var std_mean var_mean logsumexp argmax argmin all any median "
        "count_nonzero softmax log_softmax softmin cumsum cumprod cummax cummin logcumsumexp "
        "aminmax nanmedian special_softmax _softmax special_logsumexp".split(),
        along(1),
    ),
    **dict.fromkeys(["norm", "vector_norm", "linalg_vector_norm"], along(2)),
    **dict.fromkeys(["topk", "kthvalue"], along(2, -1)),
    "linalg_norm": along(2),
    "normalize": along(2, 1),
    "glu": along(1, -1),
    "diff": along(2, -1),
    "gumbel_softmax": along(4, -1),
    "cosine_similarity": compared,
    **dict.fromkeys(
        "linalg_inv linalg_det linalg_qr linalg_svd linalg_eigh linalg_cholesky matrix_exp inverse "
        "linalg_svdvals linalg_eigvalsh linalg_slogdet linalg_matrix_exp svd".split(),
        matrices,
    ),
    **dict.fromkeys("fft_fft fft_ifft fft_rfft fft_irfft fft_hfft fft_ihfft".split(), along(2, -1)),
    **dict.fromkeys("fft_fft2 fft_ifft2 fft_rfft2 fft_irfft2".split(), along(2, (-2, -1))),
    **dict.fromkeys(["tril", "triu", "tril_", "triu_"], along(9, (-2, -1), name="_")),
    **dict.fromkeys(["sort", "argsort", "msort"], sort),
    **dict.fromkeys(
        "gather take_along_dim scatter scatter_ scatter_add scatter_add_ scatter_reduce".split(),
        gather,
    ),
    **dict.fromkeys(["view_as_complex", "view_as_real"], complex_pairs),
    "one_hot": appended,
    "permute": permuted(_permute),
    **dict.fromkeys(["transpose", "swapaxes", "swapdims", "transpose_"], permuted(_transpose)),
    **dict.fromkeys(["t", ".T", ".H", "adjoint", "numpy_T"], permuted(_reversed)),
    **dict.fromkeys([".mT", ".mH", "adjoint"], permuted(_last_two)),
    **dict.fromkeys(["movedim", "moveaxis"], movedim),
    **dict.fromkeys(["expand", "expand_as", "broadcast_to"], expanded),
    **dict.fromkeys(["repeat", "tile"], repeated),
    "repeat_interleave": interleaved,
    **dict.fromkeys(["cat", "concat", "concatenate"], joined),
    "stack": stacked,
    **dict.fromkeys(["split", "chunk", "tensor_split", "split_with_sizes", "unsafe_chunk"], split),
    "unbind": unbound,
    "select": selected,
    "narrow": narrowed,
    **dict.fromkeys(["flip", "fliplr_"], flipped),
    "roll": rolled,
    "pad": padded,
    "unfold": unfolded,
    "index_select": index_selected,
    "__getitem__": indexed,
    "__setitem__": assigned,
    "linear": linear,
    **dict.fromkeys(["matmul", "mm", "bmm", "mv", "__matmul__"], matmul),
    "__rmatmul__": rmatmul,
    **dict.fromkeys(["addmm", "baddbmm", "addmv"], addmm),
    "einsum": einsum,
    "tensordot": tensordot,
    "bilinear": bilinear,
    "broadcast_tensors": broadcast,
    "scaled_dot_product_attention": attention,
    "embedding": embedding,
    "cdist": cdist,
    **dict.fromkeys(["lstm", "gru", "rnn_tanh", "rnn_relu"], recurrent),
}
# In-place forms are what they are out of place.
FAMILIES |= {
    f"{name}_": family
    for name, family in list(FAMILIES.items())
    if not name.startswith((".", "_")) and not name.endswith("_")
}
