"""Rules for products with a weight matrix: linear, matmul, addmm, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.refs import Ref, Uncovered
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import Uses, plain, rule
from vestige.gradients.uses import Outer, PerExample

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture


def positions(value: Tensor) -> Tensor:
    """(n, d) or (n, positions, d): every axis between the rows and the last one folded."""
    if value.ndim == 2:
        return value
    value = value.flatten(1, -2)
    return value.squeeze(1) if value.shape[1] == 1 else value


def summed(value: Tensor, squares: Tensor | None = None) -> PerExample:
    """The gradient of a bias: (n, ..., d) summed over the positions."""
    wide = torch.promote_types(value.dtype, torch.float32)
    if value.ndim == 2:
        return PerExample(value.to(wide), squares)
    return PerExample(value.flatten(1, -2).sum(1, dtype=wide))


def _input(capture: Capture, value: Any, refs: Sequence[Ref | None], what: str) -> Rows:
    """The rows of an operation's other factor, which must have some and be no parameter itself."""
    rows = None
    if isinstance(value, Tensor) and not capture.find(value):
        rows = capture.rows_in(value, refs, what)
    if rows is None:
        raise Uncovered(f"{what} multiplies a parameter with something that has no batch rows")
    if value.layout is not torch.strided:
        raise UnsupportedModel(
            f"{what} multiplies a parameter with a tensor of layout {value.layout}, whose rows "
            "have no norms here: use x.to_dense()."
        )
    return rows


@rule(F.linear)
def linear(
    capture: Capture, _: Any, input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Any:
    """x W^T + b."""
    w, b = capture.find(weight), capture.find(bias)
    if not (w or b):
        return NotImplemented
    rows = _input(capture, input, [w, b], "linear")
    input = capture.as_autocast(input)
    out = F.linear(input, plain(w, weight), plain(b, bias))
    # A frozen weight needs no input: then it is not kept alive.
    saved = capture.saved(input) if w else None

    def uses(g: Tensor) -> Uses:
        g = capture.as_factor(after.first(g))
        squares = capture.squares(g)  # weight and bias need the same
        parts: Uses = []
        if w and saved:
            a = positions(capture.as_factor(rows.first(saved())))
            parts.append(w.use(Outer(a, positions(g), squares)))
        if b:
            parts.append(b.use(summed(g, squares)))
        return parts

    out = capture.tap(out, [w, b], uses)
    after = capture.follows(rows, input, out)
    return out


@rule(torch.matmul, torch.mm, torch.Tensor.matmul, torch.Tensor.mm, torch.Tensor.__matmul__)
def matmul(capture: Capture, _: Any, *args: Any, **kwargs: Any) -> Any:
    """x W or W x for a matrix parameter (or a view of one) and a batched x."""
    left, right = (*args, *kwargs.values())
    return _product(capture, left, right)


@rule(torch.Tensor.__rmatmul__)
def rmatmul(capture: Capture, _: Any, right: Any, left: Any) -> Any:
    """The reflected operator: other @ self."""
    return _product(capture, left, right)


@rule(torch.addmm)
def addmm(capture: Capture, _: Any, *args: Any, **kwargs: Any) -> Any:
    """b + x W, as in the fused linear layer of GPT-2."""
    if kwargs or len(args) != 3:
        return NotImplemented
    bias, left, right = args
    b = capture.find(bias)
    if b and b.value.ndim != 1:
        return NotImplemented
    return _product(capture, left, right, bias)


def _product(capture: Capture, left: Any, right: Any, bias: Any = None) -> Any:
    w_left, w_right, b = capture.find(left), capture.find(right), capture.find(bias)
    if not (w_left or w_right or b):
        return NotImplemented
    if w_left and w_right:
        raise Uncovered("matmul multiplies two parameters")
    w = w_left or w_right
    x = right if w_left else left
    rows = _input(capture, x, [w, b], "matmul")
    if w and (w.value.ndim != 2 or (w_left and x.ndim != 3)):
        return NotImplemented
    if w_left and (place := rows.place(x.shape)) is not None and place[0] != 0:
        raise Uncovered("matmul multiplies a parameter from the left with rows on another axis")
    x = capture.as_autocast(x)
    left, right = (left, x) if w_left else (x, right)
    out = torch.matmul(plain(w_left, left), plain(w_right, right))
    if bias is not None:
        out = out + plain(b, bias)
    saved = capture.saved(x) if w else None

    def uses(g: Tensor) -> Uses:
        parts: Uses = []
        g = capture.as_factor(after.first(g))
        if w and saved:
            a, h = capture.as_factor(rows.first(saved())), g
            if w_left:  # (p, d) @ (n, d, t): move the positions before the features
                a, h = a.transpose(-1, -2), h.transpose(-1, -2)
            a, h = positions(a), positions(h)
            parts.append(w.use(Outer(a, h) if w_left else Outer(h, a)))
        if b:
            parts.append(b.use(summed(g)))
        return parts

    out = capture.tap(out, [w, b], uses)
    after = capture.follows(rows, x, out)
    return out


@rule(torch.einsum)
def einsum(capture: Capture, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Any einsum whose batched operands and output have the rows on one letter."""
    if kwargs or len(args) < 2 or not isinstance(args[0], str):
        return NotImplemented
    operands = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    refs = [capture.find(o) for o in operands]
    if not any(refs):
        return NotImplemented
    equation = args[0].replace(" ", "")
    if "..." in equation or "->" not in equation:
        return NotImplemented
    if capture.rows == 1:  # the whole operation belongs to one row
        whole = capture.tracker.on_axis((1,), 0)
        lifted = [
            capture.lift(ref, ref.value.shape, whole) if ref else o
            for ref, o in zip(refs, operands, strict=True)
        ]
        return torch.einsum(equation, *lifted)
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    letters, batched = set(), []
    for term, ref, operand in zip(terms, refs, operands, strict=True):
        if ref is None:
            rows = capture.rows_in(operand, refs, "einsum", channels=0)
            place = rows.place(operand.shape) if rows else None
            if rows is None or place is None:
                return NotImplemented
            letters.add(term[place[0]])
            batched.append((rows, operand.shape[place[0]], place[1]))
    letter = letters.pop() if letters else ""
    if letters or not letter or output.count(letter) != 1:
        return NotImplemented
    rows, size, inner = batched[0]
    for i, ref in enumerate(refs):
        if ref is not None:
            if letter in terms[i]:
                return NotImplemented
            terms[i] = letter + terms[i]
            shape = (size, *ref.value.shape)
            operands[i] = capture.lift(ref, shape, rows.at(shape, 0, inner))
    # Through the tracker, which sees whether the operands' rows agree.
    with capture:
        return torch.einsum(",".join(terms) + "->" + output, *operands)


@rule(torch._grouped_mm, F.grouped_mm)
def grouped(capture: Capture, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Tokens of all records, sorted by the expert that they go to: no rows are left."""
    ref = next((r for r in map(capture.find, args) if r), None)
    if ref is None:
        return NotImplemented
    raise UnsupportedModel(
        f"parameter {ref.slot.name!r} of a mixture of experts is used by {func.__name__!r}, where "
        "the tokens of all records are sorted by expert and no record has a row of its own: call "
        "model.set_experts_implementation('batched_mm') first, which keeps them in order."
    )
