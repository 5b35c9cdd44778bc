"""Products of matrices and what is like them."""

from __future__ import annotations

from typing import Any

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
    labels_of,
    place_of,
    rows_of,
)
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Rows


def linear(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """x W^T + b with a constant W."""
    value = argument(args, kwargs, 0, "input")
    if labels_of(see, (args[1:], [v for k, v in kwargs.items() if k != "input"])):
        raise Meet
    rows = rows_of(see(value))
    axis, inner = place_of(rows, value.shape)
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
        rows = rows_of(label)
        axis, inner = place_of(rows, value.shape)
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
    return agreed(_product(see, left, right, out))


def rmatmul(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """other @ self."""
    return agreed(_product(see, args[1], args[0], out))


def addmm(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """added + left @ right: addmm, baddbmm, addmv."""
    added, left, right = args[:3]
    if any(isinstance(v, Tensor) for v in kwargs.values()):
        raise Lost
    found = _product(see, left, right, out)
    if (label := see(added)) is not None:
        found.append(aligned(rows_of(label), added.shape, out.shape))
    return agreed(found)


def tensordot(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """The last axes of rows with the first of a constant."""
    left, dims = args[0], argument(args, kwargs, 2, "dims", 2)
    if see(args[1]) is not None or not isinstance(dims, int):
        raise Lost
    rows = rows_of(see(left))
    axis, inner = place_of(rows, left.shape)
    if axis >= left.ndim - dims:
        raise Meet
    return rows.at(out.shape, axis, inner)


def bilinear(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """x W y + b, the last axes of x and y contracted."""
    if labels_of(see, (args[2:], kwargs)):
        raise Lost
    found = []
    for value in args[:2]:
        if (label := see(value)) is not None:
            rows = rows_of(label)
            if rows.count > 1:
                axis, inner = place_of(rows, value.shape)
                if axis == value.ndim - 1:
                    raise Meet
                rows = rows.at(out.shape, axis, inner)
            found.append(rows)
    return agreed(found)


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
        rows = rows_of(label)
        axis, inner = place_of(rows, operand.shape)
        if output.count(term[axis]) != 1 or term.count(term[axis]) != 1:
            raise Meet
        found.append(rows.at(out.shape, output.index(term[axis]), inner))
    return agreed(found)


def attention(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """scaled_dot_product_attention: the rows are on an axis before the last two of each."""
    result = next(tensors_in(out))
    found = []
    for value in tensors_in((args, kwargs)):
        label = see(value)
        if label is None:
            continue
        rows = rows_of(label)
        axis, inner = place_of(rows, value.shape)
        after = axis + result.ndim - value.ndim
        if axis >= value.ndim - 2 or result.shape[after] != value.shape[axis]:
            raise Meet
        found.append(rows.at(result.shape, after, inner))
    return agreed(found)


def embedding(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A row of a constant table for every index."""
    index, table = argument(args, kwargs, 0, "input"), argument(args, kwargs, 1, "weight")
    if see(table) is not None:
        raise Meet
    rows = rows_of(see(index))
    return Rows(rows.stride * out.shape[-1], rows.batch, rows.order)


def cdist(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """Distances between the vectors of two tensors: like a product with the second transposed."""
    left, right = args[:2]
    found = []
    for value, ahead in ((left, 0), (right, 1)):
        if (label := see(value)) is None:
            continue
        rows = rows_of(label)
        axis, inner = place_of(rows, value.shape)
        if axis == value.ndim - 1:
            raise Meet
        after = axis + out.ndim - value.ndim + (ahead if axis == value.ndim - 2 else 0)
        found.append(rows.at(out.shape, after, inner))
    return agreed(found)


def recurrent(see: See, args: Args, kwargs: dict[str, Any], out: Any) -> Result:
    """A frozen recurrent stack: (output, *last states), states with the rows on axis 1."""
    value, batch_first = args[0], args[-1]
    rows = rows_of(see(value))
    if not isinstance(batch_first, bool) or len(args) != 9:
        raise Lost
    axis, inner = place_of(rows, value.shape)
    if axis != (0 if batch_first else 1) or value.ndim != 3:
        raise Meet
    for state in tensors_in(args[1]):
        if (label := see(state)) is not None:
            if place_of(label, state.shape)[0] != 1:
                raise Meet
            agreed([rows_of(label).at((1, 1), 0, 1), rows.at((1, 1), 0, 1)])
    output, *last = out
    return [rows.at(output.shape, axis, inner), *(rows.at(s.shape, 1, inner) for s in last)]
