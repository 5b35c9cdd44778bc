"""Rules for parameters that are added, multiplied or repeated: scales, shifts, class tokens.

The parameter is repeated along the batch axis and autograd then returns its gradient row by row.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vestige.gradients.capture import Capture
from vestige.gradients.refs import Ref


def elementwise(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A broadcasting operation between batched tensors and parameters."""
    refs = [capture.find(a) for a in args]
    if not any(refs) or any(capture.find(v) for v in kwargs.values()):
        return NotImplemented
    others = [a for a, ref in zip(args, refs, strict=True) if isinstance(a, Tensor) and not ref]
    if not any(capture.is_batched(o, refs) for o in others):
        return NotImplemented
    shape = torch.broadcast_shapes(*(a.shape for a in args if isinstance(a, Tensor)))
    axis = capture.axis if len(shape) > 2 else 0
    if shape[axis] != capture.rows:
        return NotImplemented
    lifted = [
        _along(capture, ref, len(shape), axis) if ref else a
        for a, ref in zip(args, refs, strict=True)
    ]
    if any(value is None for value, ref in zip(lifted, refs, strict=True) if ref):
        return NotImplemented
    return func(*lifted, **kwargs)


def _along(capture: Capture, ref: Ref, ndim: int, axis: int) -> Tensor | None:
    """The parameter repeated along the batch axis, None if it already has rows there."""
    size = [1] * (ndim - ref.value.ndim) + list(ref.value.shape)
    if size[axis] != 1:
        return None
    size[axis] = capture.rows
    return capture.lift(ref, size, axis)


def expand(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A class token or a learned query handed to every row: token.expand(rows, -1, -1)."""
    value, *sizes = args
    ref = capture.find(value)
    if ref is None or kwargs:
        return NotImplemented
    if len(sizes) == 1 and isinstance(sizes[0], tuple | list):
        sizes = list(sizes[0])
    axis, shape = capture.axis, ref.value.shape
    if len(sizes) != len(shape) or len(shape) <= axis or shape[axis] != 1:
        return NotImplemented
    kept = (sizes[i] in (-1, shape[i]) for i in range(len(shape)) if i != axis)
    if sizes[axis] != capture.rows or not all(kept):
        return NotImplemented
    size = list(shape)
    size[axis] = capture.rows
    return capture.lift(ref, size, axis)


def repeat(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The same with token.repeat(rows, 1, 1)."""
    value, *times = args
    if len(times) == 1 and isinstance(times[0], tuple | list):
        times = list(times[0])
    if capture.find(value) is None or len(times) != value.ndim or value.ndim <= capture.axis:
        return NotImplemented
    if any(t != 1 for i, t in enumerate(times) if i != capture.axis):
        return NotImplemented
    sizes = [-1] * value.ndim
    sizes[capture.axis] = times[capture.axis]
    return expand(capture, func, (value, *sizes), kwargs)


def prelu(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """max(x, 0) + weight * min(x, 0), the weight one number or one per channel."""
    x, weight = (*args, *kwargs.values())
    ref = capture.find(weight)
    if ref is None or ref.is_view or capture.axis != 0 or not capture.is_batched(x, [ref]):
        return NotImplemented
    channels = [1] * x.ndim
    if x.ndim > 1:
        channels[1] = weight.numel()
    size = [capture.rows, *channels[1:]]

    # The weight is one-dimensional: the channels become an axis of their own.
    slope = capture.lift(ref, (capture.rows, weight.numel()), 0).reshape(size)
    return x.clamp(min=0) + slope * x.clamp(max=0)


def pick(capture: Capture, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Boolean indexing and its like: how many positions an example keeps depends on its content."""
    index = args[1] if func is torch.Tensor.__getitem__ else None
    parts = index if isinstance(index, tuple) else (index,)
    masks = any(isinstance(i, Tensor) and i.dtype in (torch.bool, torch.uint8) for i in parts)
    condition_only = func is torch.where and len(args) + len(kwargs) == 1
    if masks or condition_only or func not in (torch.Tensor.__getitem__, torch.where):
        capture.pick_positions()
    return NotImplemented


_PICKS = ["masked_select", "nonzero", "argwhere", "unique", "unique_consecutive"]
_BINARY = ["add", "sub", "mul", "div", "true_divide", "add_", "sub_", "mul_", "div_", "__rsub__"]
TABLE: dict[Any, Any] = {
    **{getattr(torch.Tensor, name): elementwise for name in _BINARY},
    **{getattr(torch, name): elementwise for name in ("add", "sub", "mul", "div", "true_divide")},
    torch.Tensor.expand: expand,
    torch.Tensor.repeat: repeat,
    torch.prelu: prelu,
    torch.Tensor.__getitem__: pick,
    torch.where: pick,
    **{getattr(torch.Tensor, name): pick for name in _PICKS},
    **{getattr(torch, name): pick for name in _PICKS},
}
