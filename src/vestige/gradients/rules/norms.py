"""Rules for normalisation layers: layer, root-mean-square, group and instance norm.

Each is a normalisation followed by weight * x + bias. The normalised x is computed again for the
weight's gradient, so that it need not be kept; on a GPU its means and scales are, and one kernel
makes both gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.kernels import fused
from vestige.gradients.refs import Uncovered
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import Uses, plain, rule
from vestige.gradients.rules.convolution import rows_first
from vestige.gradients.uses import PerExample

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

Parameters = tuple[Tensor | None, Tensor | None]  # weight and bias


class OneKernel(NamedTuple):
    """A normalisation whose means and scales are kept, and the kernel that makes its gradients."""

    run: Callable[[Any, Any, Any], tuple[Tensor, Tensor, Tensor]]  # the output, means and scales
    sums: Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]  # of x, g and those

    def covers(self, x: Tensor, parameters: Parameters) -> bool:
        """Whether the rows come first, in a precision that is computed in, on a GPU."""
        return (
            x.is_cuda
            and x.dtype in (torch.float32, torch.bfloat16)
            and x.is_contiguous()
            and x.numel() > 0
            and all(p is None or p.dtype == self.widened(x).dtype for p in parameters)
            and fused.available()
        )

    @staticmethod
    def widened(x: Tensor) -> Tensor:
        """`x` as autocast hands it to a normalisation."""
        return x.float() if torch.is_autocast_enabled("cuda") else x


def _affine(
    capture: Capture,
    input: Tensor,
    parameters: Parameters,
    run: Callable[[Any, Any, Any], Tensor],
    reduce: Callable[[Tensor], Tensor],
    channels: int,
    kernel: OneKernel | None = None,
) -> Any:
    """`run(x, weight, bias)` normalises; `reduce` sums (n, ...) to (n, *shape of the parameter).

    The last `channels` axes of the input must not have the rows. `kernel` does the same.
    """
    w, b = map(capture.find, parameters)
    if not (w or b):
        return NotImplemented
    rows = (
        None if capture.find(input) else capture.rows_in(input, [w, b], "a normalisation", channels)
    )
    if rows is None:
        raise Uncovered("a normalisation whose input has no batch rows")
    weight, bias = parameters
    simple = rows.order is None and rows.place(input.shape) == (0, 1)
    single = capture.dtype == torch.float32 and not capture.traced  # what the kernel gives
    if kernel and simple and single and kernel.covers(input, parameters):
        return _in_one(capture, input, parameters, kernel, rows)
    out = run(input, plain(w, weight), plain(b, bias))
    saved = capture.saved(input) if w else None

    def uses(g: Tensor) -> Uses:
        g = capture.by_row(g, rows)
        parts: Uses = []
        if w and saved:
            normal = capture.by_row(run(saved(), None, None), rows)
            parts.append(w.use(PerExample(reduce(g * normal))))
        if b:
            parts.append(b.use(PerExample(reduce(g))))
        return parts

    out = capture.tap(out, [w, b], uses)
    capture.follows(rows, input, out)
    return out


def _in_one(
    capture: Capture, input: Tensor, parameters: Parameters, kernel: OneKernel, rows: Rows
) -> Tensor:
    """`_affine` on a GPU."""
    w, b = map(capture.find, parameters)
    weight, bias = parameters
    out, *kept = kernel.run(kernel.widened(input), plain(w, weight), plain(b, bias))
    means, scales = (value.detach() for value in kept)  # torch gives them the node that they are in
    saved = capture.saved(input)

    def uses(g: Tensor) -> Uses:
        gradients = kernel.sums(saved(), g.contiguous(), means, scales)
        pairs = zip((w, b), gradients, strict=True)
        return [r.use(PerExample(v.view(len(v), *r.value.shape))) for r, v in pairs if r]

    out = capture.tap(out, [w, b], uses)
    capture.follows(rows, input, out)
    return out


def _over_features(
    capture: Capture,
    input: Tensor,
    shape: list[int],
    parameters: Parameters,
    run: Callable[[Any, Any, Any], Tensor],
    kernel: OneKernel | None = None,
) -> Any:
    """A normalisation over the last axes, of this shape, at every position by itself."""
    axes = len(shape)

    def reduce(value: Tensor) -> Tensor:
        return value.flatten(1, -1 - axes).sum(1) if value.ndim > axes + 1 else value

    return _affine(capture, input, parameters, run, reduce, axes, kernel)


@rule(F.layer_norm, torch.layer_norm)
def layer_norm(
    capture: Capture,
    _: Any,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_cudnn: Any,
) -> Any:
    """Layer normalisation."""

    def run(x: Tensor, w: Any, b: Any) -> Tensor:
        return F.layer_norm(x, normalized_shape, w, b, eps)

    def kept(x: Tensor, w: Any, b: Any) -> tuple[Tensor, Tensor, Tensor]:
        return torch.native_layer_norm(x, normalized_shape, w, b, eps)

    def sums(x: Tensor, g: Tensor, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        width = torch.Size(normalized_shape).numel()
        return fused.affine_sums(x.view(len(x), -1, width), g, means, scales)

    kernel = OneKernel(kept, sums)
    return _over_features(capture, input, normalized_shape, (weight, bias), run, kernel)


@rule(F.rms_norm, torch.rms_norm)
def rms_norm(
    capture: Capture,
    _: Any,
    input: Tensor,
    normalized_shape: list[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    """Root-mean-square normalisation."""

    def run(x: Tensor, w: Any, _: Any) -> Tensor:
        return F.rms_norm(x, normalized_shape, w, eps)

    return _over_features(capture, input, normalized_shape, (weight, None), run)


def _over_channels(
    capture: Capture,
    input: Tensor,
    parameters: Parameters,
    run: Callable[[Any, Any, Any], Tensor],
    kernel: OneKernel | None = None,
) -> Any:
    """A normalisation of (n, channels, ...) with a weight and a bias for each channel."""
    refs = [capture.find(value) for value in parameters]
    if any(refs):
        rows_first(capture, input, refs)

    def reduce(value: Tensor) -> Tensor:
        return value.flatten(2).sum(2) if value.ndim > 2 else value

    return _affine(capture, input, parameters, run, reduce, input.ndim - 1, kernel)


@rule(F.group_norm, torch.group_norm)
def group_norm(
    capture: Capture,
    _: Any,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *_cudnn: Any,
) -> Any:
    """Group normalisation."""
    w = capture.find(weight) or capture.find(bias)
    if w and input.ndim > 1 and input.shape[1:].numel() == num_groups:
        raise UnsupportedModel(
            f"the GroupNorm with {w.slot.name!r} is given {tuple(input.shape[1:])} in {num_groups} "
            "groups: it normalises one value at a time, which gives its bias whatever comes in. "
            "Use fewer groups, larger inputs, or leave it out."
        )

    def run(x: Tensor, w: Any, b: Any) -> Tensor:
        return F.group_norm(x, num_groups, w, b, eps)

    def kept(x: Tensor, w: Any, b: Any) -> tuple[Tensor, Tensor, Tensor]:
        (n, channels), size = x.shape[:2], x[0, 0].numel()
        return torch.native_group_norm(x, w, b, n, channels, size, num_groups, eps)

    def sums(x: Tensor, g: Tensor, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
        return fused.affine_channel_sums(x.view(*x.shape[:2], -1), g, means, scales)

    kernel = OneKernel(kept, sums)
    return _over_channels(capture, input, (weight, bias), run, kernel)


@rule(F.instance_norm)
def instance_norm(capture: Capture, _: Any, input: Tensor, **options: Any) -> Any:
    """Instance normalisation without running statistics. (torch names all options.)"""
    if options.get("running_mean") is not None or not options.get("use_input_stats", True):
        raise UnsupportedModel(
            "instance_norm with running statistics averages over private examples: build the "
            "layer with track_running_stats=False."
        )

    def run(x: Tensor, w: Any, b: Any) -> Tensor:
        return F.instance_norm(x, weight=w, bias=b, eps=options["eps"])

    return _over_channels(capture, input, (options.get("weight"), options.get("bias")), run)


@rule(F.batch_norm, torch.batch_norm)
def batch_norm(capture: Capture, _: Any, *args: Any, **kwargs: Any) -> Any:
    """Batch normalisation mixes the examples of a batch: refused, also in functional code.

    Where a weight is normalised (standardised convolutions), there are no examples to mix.
    """
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    input = args[0] if args else kwargs["input"]
    if not training or capture.find(input) or capture.tracker.label(input) is None:
        return NotImplemented
    raise UnsupportedModel(
        "batch_norm mixes the examples of a batch, so no example has a gradient of its own: "
        "use group_norm (vestige.fix(model) replaces BatchNorm modules)."
    )
