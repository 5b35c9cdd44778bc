"""Rules for products with a weight matrix: linear, matmul, addmm, einsum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.capture import Capture, Uses
from vestige.gradients.refs import Ref, Uncovered
from vestige.gradients.uses import Outer, PerExample, row_squares


def plain(ref: Ref | None, value: Any) -> Any:
    """The argument as autograd may see it: detached if it is a parameter."""
    return ref.value if ref else value


def positions(value: Tensor) -> Tensor:
    """(n, d) or (n, positions, d): every axis between the rows and the last one folded."""
    if value.ndim == 2:
        return value
    value = value.flatten(1, -2)
    return value.squeeze(1) if value.shape[1] == 1 else value


def summed(value: Tensor, squares: Tensor | None = None) -> PerExample:
    """The gradient of a bias: (n, ..., d) summed over the positions."""
    if value.ndim == 2:
        return PerExample(value, squares)
    return PerExample(value.flatten(1, -2).sum(1))


def _input(capture: Capture, value: Any, refs: Sequence[Ref | None], what: str) -> Tensor:
    """An operation's other factor: it must carry the batch's rows and be no parameter itself."""
    if not isinstance(value, Tensor) or capture.find(value) or not capture.is_batched(value, refs):
        raise Uncovered(f"{what} multiplies a parameter with something that has no batch rows")
    if value.layout is not torch.strided:
        raise UnsupportedModel(
            f"{what} multiplies a parameter with a tensor of layout {value.layout}, whose rows "
            "have no norms here: use x.to_dense()."
        )
    return value


def linear(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x W^T + b."""

    def call(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
        w, b = capture.find(weight), capture.find(bias)
        if not (w or b):
            return NotImplemented
        x, layout = _input(capture, input, [w, b], "linear"), capture.layout()
        out = F.linear(x, plain(w, weight), plain(b, bias))
        # A frozen weight needs no input: then it is not kept alive.
        saved = capture.saved(x) if w else None

        def uses(g: Tensor) -> Uses:
            g = layout.by_row(g)
            # Without positions, weight and bias need the same norms of g.
            squares = row_squares(g, factor=True) if g.ndim == 2 else None
            found: Uses = []
            if w and saved:
                a = positions(layout.by_row(saved()))
                found.append(w.use(Outer(a, positions(g), squares)))
            if b:
                found.append(b.use(summed(g, squares)))
            return found

        return capture.tap(out, [w, b], uses)

    return call(*args, **kwargs)


def matmul(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """x W or W x for a matrix parameter (or a view of one) and a batched x."""
    left, right = (*args, *kwargs.values())
    return _product(capture, left, right, None, None)


def rmatmul(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The reflected operator: other @ self."""
    return _product(capture, args[1], args[0], None, None)


def addmm(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """b + x W, as in the fused linear layer of GPT-2."""
    if kwargs or len(args) != 3:
        return NotImplemented
    bias, left, right = args
    b = capture.find(bias)
    if b and b.value.ndim != 1:
        return NotImplemented
    return _product(capture, left, right, b, bias)


def _product(capture: Capture, left: Any, right: Any, b: Ref | None, bias: Any) -> Any:
    w_left, w_right = capture.find(left), capture.find(right)
    if not (w_left or w_right or b):
        return NotImplemented
    if w_left and w_right:
        raise Uncovered("matmul multiplies two parameters")
    w = w_left or w_right
    x = _input(capture, right if w_left else left, [w, b], "matmul")
    if w and (w.value.ndim != 2 or (w_left and x.ndim != 3)):
        return NotImplemented
    layout = capture.layout()
    out = torch.matmul(plain(w_left, left), plain(w_right, right))
    if bias is not None:
        out = out + plain(b, bias)
    saved = capture.saved(x) if w else None

    def uses(g: Tensor) -> Uses:
        found: Uses = []
        if w and saved:
            a = saved()
            if w_left:  # (p, d) @ (n, d, t): move the positions before the features
                a, g = a.transpose(1, 2), g.transpose(1, 2)
            a, g = positions(layout.by_row(a)), positions(layout.by_row(g))
            found.append(w.use(Outer(a, g) if w_left else Outer(g, a)))
        if b:
            found.append(b.use(summed(layout.by_row(g))))
        return found

    return capture.tap(out, [w, b], uses)


def einsum(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Any einsum whose batched operands and output begin with the rows' letter."""
    if kwargs or len(args) < 2 or not isinstance(args[0], str) or capture.axis != 0:
        return NotImplemented
    operands = list(args[1] if isinstance(args[1], list | tuple) else args[1:])
    refs = [capture.find(o) for o in operands]
    if not any(refs):
        return NotImplemented
    equation = args[0].replace(" ", "")
    if "..." in equation or "->" not in equation:
        return NotImplemented
    inputs, output = equation.split("->")
    terms = inputs.split(",")
    letter = output[:1]
    batched = [t for t, ref in zip(terms, refs, strict=True) if ref is None]
    if not letter or not batched or any(t[:1] != letter or t.count(letter) > 1 for t in batched):
        return NotImplemented
    for i, ref in enumerate(refs):
        if ref is None:
            _input(capture, operands[i], refs, "einsum")
            continue
        if letter in terms[i]:
            return NotImplemented
        terms[i] = letter + terms[i]
        operands[i] = capture.lift(ref, (capture.rows, *ref.value.shape), 0)
    return torch.einsum(",".join(terms) + "->" + output, *operands)


TABLE: dict[Any, Any] = {
    F.linear: linear,
    torch.matmul: matmul,
    torch.mm: matmul,
    torch.Tensor.matmul: matmul,
    torch.Tensor.mm: matmul,
    torch.Tensor.__matmul__: matmul,
    torch.Tensor.__rmatmul__: rmatmul,
    torch.addmm: addmm,
    torch.einsum: einsum,
}
