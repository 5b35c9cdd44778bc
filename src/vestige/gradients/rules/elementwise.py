"""Rules for parameters that are added, multiplied or repeated: scales, shifts, class tokens.

The parameter is repeated along the batch axis and autograd then returns its gradient row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vestige.gradients.following import follow
from vestige.gradients.refs import Ref
from vestige.gradients.rows import Meeting, Rows
from vestige.gradients.rules.base import rule

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

_METHODS = ["add", "sub", "mul", "div", "true_divide", "add_", "sub_", "mul_", "div_", "__rsub__"]
_BINARY = [getattr(torch.Tensor, name) for name in _METHODS]


@rule(*_BINARY, torch.add, torch.sub, torch.mul, torch.div, torch.true_divide)
def elementwise(capture: Capture, func: Any, *args: Any, **kwargs: Any) -> Any:
    """A broadcasting operation between batched tensors and parameters."""
    refs = [capture.find(a) for a in args]
    if not any(refs) or any(capture.find(v) for v in kwargs.values()):
        return NotImplemented
    others = [a for a, ref in zip(args, refs, strict=True) if isinstance(a, Tensor) and not ref]
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, Tensor)))
    rows = _joint_rows(capture, others, refs, shape)
    if rows is None:
        return NotImplemented
    pairs = list(zip(args, refs, strict=True))
    lifted = [_along(capture, ref, shape, rows) if ref else a for a, ref in pairs]
    if any(value is None for value, ref in zip(lifted, refs, strict=True) if ref):
        return NotImplemented
    return func(*lifted, **kwargs)


def _joint_rows(
    capture: Capture, others: list[Tensor], refs: list[Ref | None], shape: Sequence[int]
) -> Rows | None:
    """The rows that the arguments give to the result, None if they are constants."""
    batched = [
        (o, rows)
        for o in others
        if (rows := capture.rows_in(o, refs, "a pointwise operation", channels=0)) is not None
    ]
    if not batched:
        return None
    labels = {id(o): rows for o, rows in batched}
    result = torch.empty(shape, device="meta")
    label = follow(torch.mul, labels, tuple(o for o, _ in batched), {}, result)
    if isinstance(label, Meeting):
        raise label.refusal()
    assert isinstance(label, Rows)
    return label


def _along(capture: Capture, ref: Ref, shape: Sequence[int], rows: Rows) -> Tensor | None:
    """The parameter repeated along the axis with the rows, None if it has entries there."""
    size = [1] * (len(shape) - ref.value.ndim) + list(ref.value.shape)
    if capture.rows == 1:
        return capture.lift(ref, size, rows)
    place = rows.place(shape)
    if place is None or size[place[0]] != 1:
        return None
    size[place[0]] = shape[place[0]]
    return capture.lift(ref, size, rows.at(size, *place))


@rule(torch.Tensor.expand)
def expand(capture: Capture, _: Any, value: Tensor, *sizes: Any, **kwargs: Any) -> Any:
    """A class token or a learned query handed to every row: token.expand(rows, -1, -1)."""
    ref = capture.find(value)
    if ref is None or kwargs:
        return NotImplemented
    sizes = _numbers(sizes)
    shape = [1] * (len(sizes) - ref.value.ndim) + list(ref.value.shape)
    wide = [old if new == -1 else new for new, old in zip(sizes, shape, strict=True)]
    grown = [i for i, (new, old) in enumerate(zip(wide, shape, strict=True)) if new != old]
    # The rows are on the axis that becomes as long as the batch. A batch of one changes nothing,
    # and all axes of length one are its row's.
    likely = (capture.axis, 0, *range(len(shape)))
    axes = grown or [i for i in likely if i < len(shape) and shape[i] == 1][:1]
    if len(axes) != 1 or wide[axes[0]] != capture.rows:
        return NotImplemented
    return capture.lift(ref, wide, capture.tracker.on_axis(wide, axes[0]))


@rule(torch.Tensor.repeat)
def repeat(capture: Capture, func: Any, value: Tensor, *times: Any, **kwargs: Any) -> Any:
    """The same with token.repeat(rows, 1, 1)."""
    times = _numbers(times)
    if capture.find(value) is None or len(times) != value.ndim:
        return NotImplemented
    if any(t != 1 and value.shape[i] != 1 for i, t in enumerate(times)):
        return NotImplemented
    sizes = [t * n for t, n in zip(times, value.shape, strict=True)]
    made = expand(capture, func, value, *sizes, **kwargs)
    if made is NotImplemented:
        return made
    with capture:
        return made.contiguous()  # entries of their own, as views of what is repeated expect


def _numbers(given: tuple[Any, ...]) -> tuple[int, ...]:
    """Numbers that are given one by one, or as one sequence."""
    return tuple(given[0]) if len(given) == 1 and isinstance(given[0], tuple | list) else given


@rule(torch.prelu)
def prelu(capture: Capture, _: Any, *args: Any, **kwargs: Any) -> Any:
    """max(x, 0) + weight * min(x, 0), the weight one number or one per channel."""
    x, weight = (*args, *kwargs.values())
    ref = capture.find(weight)
    if ref is None or ref.is_view:
        return NotImplemented
    rows = capture.rows_in(x, [ref], "prelu", channels=x.ndim - 1)
    if rows is None or rows.order is not None or x.shape[0] != capture.rows:
        return NotImplemented
    channels = [1] * x.ndim
    if x.ndim > 1:
        channels[1] = weight.numel()
    flat = (capture.rows, weight.numel())
    # The weight is one-dimensional: the channels become an axis of their own.
    slope = capture.lift(ref, flat, capture.tracker.on_axis(flat, 0))
    return x.clamp(min=0) + slope.reshape(capture.rows, *channels[1:]) * x.clamp(max=0)
