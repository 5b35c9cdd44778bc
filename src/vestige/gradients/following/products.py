"""Products of matrices and what is like them."""

from __future__ import annotations

from torch import Tensor

from vestige.gradients.following.base import (
    Call,
    Lost,
    Meet,
    Result,
    agreed,
    aligned,
    place_of,
    rows_of,
)
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Rows


def linear(call: Call) -> Result:
    """x W^T + b with a constant W."""
    call.refuse_others(Meet)
    axis, inner = call.place
    if axis == call.value.ndim - 1:
        raise Meet
    return call.stays(axis, inner)


def _product(call: Call, left: Tensor, right: Tensor) -> list[Rows]:
    """The labels that both factors of a matrix product give its result."""
    out, labels = call.out, []
    for value, contracted, other in ((left, -1, right), (right, -2, left)):
        label = call.see(value)
        if label is None:
            continue
        axis, inner = place_of(label, value.shape)
        if value.ndim == 1 or axis == value.ndim + contracted:
            raise Meet
        if other.ndim == 1:
            after = axis if axis < value.ndim - 2 or contracted == -1 else axis - 1
        else:
            after = axis + out.ndim - value.ndim
        if out.shape[after] != value.shape[axis]:
            raise Lost
        labels.append(rows_of(label).at(out.shape, after, inner))
    return labels


def matmul(call: Call) -> Result:
    """Matrix products with any number of batch axes."""
    left, right = (*call.args, *call.kwargs.values())[:2]
    return agreed(_product(call, left, right))


def rmatmul(call: Call) -> Result:
    """other @ self."""
    return agreed(_product(call, call.args[1], call.args[0]))


def addmm(call: Call) -> Result:
    """added + left @ right: addmm, baddbmm, addmv."""
    added, left, right = call.args[:3]
    if any(isinstance(v, Tensor) for v in call.kwargs.values()):
        raise Lost
    labels = _product(call, left, right)
    if (label := call.see(added)) is not None:
        labels.append(aligned(label, added.shape, call.out.shape))
    return agreed(labels)


def tensordot(call: Call) -> Result:
    """The last axes of rows with the first of a constant."""
    dims = call.argument(2, "dims", 2)
    if not isinstance(dims, int):
        raise Lost
    if (label := call.see(call.args[1])) is not None:
        raise Meet if place_of(label, call.args[1].shape)[0] < dims else Lost
    axis, inner = call.place
    if axis >= call.value.ndim - dims:
        raise Meet
    return call.stays(axis, inner)


def bilinear(call: Call) -> Result:
    """x W y + b, the last axes of x and y contracted."""
    call.refuse_others(Lost, first=2)

    def where(value: Tensor, axis: int) -> int:
        if axis == value.ndim - 1:
            raise Meet
        return axis

    return call.joint(call.args[:2], where)


def einsum(call: Call) -> Result:
    """The letter of the rows must be in the output."""
    equation, *operands = call.args
    if not isinstance(equation, str) or "..." in equation:
        raise Lost
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = list(operands[0])
    inputs, arrow, output = equation.replace(" ", "").partition("->")
    if not arrow:
        letters = inputs.replace(",", "")
        output = "".join(sorted(c for c in set(letters) if letters.count(c) == 1))
    labels = []
    for term, operand in zip(inputs.split(","), operands, strict=True):
        label = call.see(operand)
        if label is None:
            continue
        axis, inner = place_of(label, operand.shape)
        if output.count(term[axis]) != 1 or term.count(term[axis]) != 1:
            raise Meet
        labels.append(rows_of(label).at(call.out.shape, output.index(term[axis]), inner))
    return agreed(labels)


def attention(call: Call) -> Result:
    """scaled_dot_product_attention: the rows are on an axis before the last two of each."""
    result = call.result

    def where(value: Tensor, axis: int) -> int:
        after = axis + result.ndim - value.ndim
        if axis >= value.ndim - 2 or result.shape[after] != value.shape[axis]:
            raise Meet
        return after

    return call.joint((call.args, call.kwargs), where)


def embedding(call: Call) -> Result:
    """A row of a constant table for every index."""
    if call.see(call.argument(1, "weight")) is not None:
        raise Meet
    rows = call.rows
    return Rows(rows.stride * call.out.shape[-1], rows.batch, rows.order)


def cdist(call: Call) -> Result:
    """Distances between the vectors of two tensors: like a product with the second transposed."""
    left, right = call.args[:2]
    out, labels = call.out, []
    for value, ahead in ((left, 0), (right, 1)):
        if (label := call.see(value)) is None:
            continue
        axis, inner = place_of(label, value.shape)
        if axis == value.ndim - 1:
            raise Meet
        after = axis + out.ndim - value.ndim + (ahead if axis == value.ndim - 2 else 0)
        labels.append(rows_of(label).at(out.shape, after, inner))
    return agreed(labels)


def recurrent(call: Call) -> Result:
    """A frozen recurrent stack: (output, *last states), states with the rows on axis 1."""
    value, rows, batch_first = call.value, call.rows, call.args[-1]
    if not isinstance(batch_first, bool) or len(call.args) != 9:
        raise Lost
    axis, inner = call.place
    if axis != (0 if batch_first else 1) or value.ndim != 3:
        raise Meet
    for state in tensors_in(call.args[1]):
        if (label := call.see(state)) is not None:
            if place_of(label, state.shape)[0] != 1:
                raise Meet
            agreed([rows_of(label).at((1, 1), 0, 1), rows.at((1, 1), 0, 1)])
    output, *last = call.out
    return [rows.at(output.shape, axis, inner), *(rows.at(s.shape, 1, inner) for s in last)]
