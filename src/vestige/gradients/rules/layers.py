"""Rules for convolutions, normalisation layers and embeddings."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.capture import Capture, Uses
from vestige.gradients.refs import Ref, Uncovered
from vestige.gradients.rows import Rows
from vestige.gradients.rules.convolution import Convolved, Geometry
from vestige.gradients.rules.linear import plain
from vestige.gradients.uses import LookedUp, PerExample, Use


def _convolution(function: Callable[..., Tensor], axes: int) -> Callable[..., Any]:
    def rule(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        def call(
            input: Tensor,
            weight: Tensor,
            bias: Tensor | None = None,
            stride: Any = 1,
            padding: Any = 0,
            dilation: Any = 1,
            groups: int = 1,
        ) -> Any:
            w, b = capture.find(weight), capture.find(bias)
            if not (w or b):
                return NotImplemented
            rows = _rows_first(capture, input, [w, b], axes + 2)
            kernel = plain(w, weight)
            out = function(input, kernel, plain(b, bias), stride, padding, dilation, groups)
            geometry = Geometry.of(weight, stride, padding, dilation, groups)
            saved = capture.saved(input) if w else None

            def uses(g: Tensor) -> Uses:
                dtype = capture.collector.total.dtype
                g = g.to(dtype)
                found: Uses = []
                if b:
                    found.append(b.use(PerExample(g.flatten(2).sum(2))))
                if w and saved:
                    found.append(w.use(Convolved(saved().to(dtype), g, kernel.to(dtype), geometry)))
                return found

            out = capture.tap(out, [w, b], uses)
            capture.follows(rows, input, out)
            return out

        return call(*args, **kwargs)

    return rule


def _affine(
    capture: Capture,
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    run: Callable[[Any, Any, Any], Tensor],
    reduce: Callable[[Tensor], Tensor],
    channels: int,
) -> Any:
    """A normalisation followed by weight * x + bias: the normalised x is recomputed for its
    gradient, and `reduce` sums (n, ...) down to (n, *shape of the parameter)."""
    w, b = capture.find(weight), capture.find(bias)
    if not (w or b):
        return NotImplemented
    rows = (
        None if capture.find(input) else capture.rows_in(input, [w, b], "a normalisation", channels)
    )
    if rows is None:
        raise Uncovered("a normalisation whose input has no batch rows")
    out = run(input, plain(w, weight), plain(b, bias))
    saved = capture.saved(input) if w else None

    def uses(g: Tensor) -> Uses:
        g = capture.by_row(g, rows)
        found: Uses = []
        if w and saved:
            normal = capture.by_row(run(saved(), None, None), rows)
            found.append(w.use(PerExample(reduce(g * normal))))
        if b:
            found.append(b.use(PerExample(reduce(g))))
        return found

    out = capture.tap(out, [w, b], uses)
    capture.follows(rows, input, out)
    return out


def _over_features(axes: int) -> Callable[[Tensor], Tensor]:
    """Sum over the positions between the rows and the last `axes` axes."""

    def reduce(value: Tensor) -> Tensor:
        return value.flatten(1, -1 - axes).sum(1) if value.ndim > axes + 1 else value

    return reduce


def _over_channels(value: Tensor) -> Tensor:
    """Sum (n, channels, ...) over everything after the channels."""
    return value.flatten(2).sum(2) if value.ndim > 2 else value


def layer_norm(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Layer normalisation."""

    def call(
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        axes = len(normalized_shape)

        def run(x: Tensor, w: Any, b: Any) -> Tensor:
            return F.layer_norm(x, normalized_shape, w, b, eps)

        return _affine(capture, input, weight, bias, run, _over_features(axes), axes)

    return call(*args, **kwargs)


def rms_norm(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Root-mean-square normalisation."""

    def call(
        input: Tensor,
        normalized_shape: list[int],
        weight: Tensor | None = None,
        eps: float | None = None,
    ) -> Any:
        axes = len(normalized_shape)

        def run(x: Tensor, w: Any, _: Any) -> Tensor:
            return F.rms_norm(x, normalized_shape, w, eps)

        return _affine(capture, input, weight, None, run, _over_features(axes), axes)

    return call(*args, **kwargs)


def group_norm(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Group normalisation."""

    def call(
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        refs = [capture.find(weight), capture.find(bias)]
        if any(refs):
            _rows_first(capture, input, refs)

        def run(x: Tensor, w: Any, b: Any) -> Tensor:
            return F.group_norm(x, num_groups, w, b, eps)

        return _affine(capture, input, weight, bias, run, _over_channels, input.ndim - 1)

    return call(*args, **kwargs)


def instance_norm(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Instance normalisation without running statistics."""

    def call(
        input: Tensor,
        running_mean: Tensor | None = None,
        running_var: Tensor | None = None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        use_input_stats: bool = True,
        momentum: float = 0.1,
        eps: float = 1e-5,
        *_: Any,
    ) -> Any:
        if running_mean is not None or not use_input_stats:
            raise UnsupportedModel(
                "instance_norm with running statistics averages over private examples: build the "
                "layer with track_running_stats=False."
            )
        refs = [capture.find(weight), capture.find(bias)]
        if any(refs):
            _rows_first(capture, input, refs)

        def run(x: Tensor, w: Any, b: Any) -> Tensor:
            return F.instance_norm(x, None, None, w, b, True, momentum, eps)

        return _affine(capture, input, weight, bias, run, _over_channels, input.ndim - 1)

    return call(*args, **kwargs)


def batch_norm(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Batch normalisation mixes the examples of a batch: refused, also in functional code."""
    training = kwargs.get("training", args[5] if len(args) > 5 else False)
    if not training:
        return NotImplemented
    raise UnsupportedModel(
        "batch_norm mixes the examples of a batch, so no example has a gradient of its own: "
        "use group_norm (vestige.fix(model) replaces BatchNorm modules)."
    )


def _rows_first(
    capture: Capture, input: Tensor, refs: list[Ref | None], ndim: int | None = None
) -> Rows:
    """The rows of images, one to a row on the first axis, whatever batch_first says."""
    if ndim is not None and input.ndim != ndim:
        raise Uncovered(
            f"a convolution is given an input of {input.ndim} axes, where rows, channels and "
            f"positions make {ndim}"
        )
    rows = None
    if not capture.find(input):
        rows = capture.rows_in(input, refs, "a convolution or channel norm", input.ndim - 1)
    # Rows in another order, or several images to a row: the module runs row by row.
    if rows is None or rows.order is not None or input.shape[0] != capture.rows:
        raise Uncovered("a convolution or channel norm whose first axis is not the batch")
    return rows


def _shared_lookup(capture: Capture, w: Ref, indices: Tensor, padding_idx: int | None) -> Tensor:
    """The same rows for every example, such as position embeddings."""
    size = w.value.shape[0]

    def attribute(use: Use) -> Use:
        g = use.dense()
        at = indices.expand(len(g), *indices.shape)
        if padding_idx is not None:
            g = g.masked_fill((at == padding_idx % size).unsqueeze(-1), 0)
        return LookedUp(at, g, size)

    return capture.share(w, F.embedding(indices, w.value, padding_idx), attribute)


def embedding(capture: Capture, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A row of the table for every index."""

    def call(
        input: Tensor,
        weight: Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        w = capture.find(weight)
        if not w:
            return NotImplemented
        if max_norm is not None or scale_grad_by_freq:
            option = "max_norm" if max_norm is not None else "scale_grad_by_freq"
            raise UnsupportedModel(
                f"embedding {w.slot.name!r} uses {option}, which depends on the other examples of "
                "the batch: build the layer without it."
            )
        rows = capture.rows_in(input, [w], "embedding", channels=0)
        if rows is None:
            return _shared_lookup(capture, w, input, padding_idx)
        indices = capture.saved(input)
        out = F.embedding(input, w.value, padding_idx)

        def uses(g: Tensor) -> Uses:
            assert w is not None
            g, at = capture.by_row(g, after), rows.first(indices())
            if padding_idx is not None:
                pad = padding_idx % weight.shape[0]
                g = g.masked_fill((at == pad).unsqueeze(-1), 0)
            return [w.use(LookedUp(at, g, weight.shape[0]))]

        out = capture.tap(out, [w], uses)
        after = Rows(rows.stride * out.shape[-1], rows.batch, rows.order)
        capture.tracker.give(out, after)
        return out

    return call(*args, **kwargs)


TABLE: dict[Any, Any] = {
    F.conv1d: _convolution(F.conv1d, 1),
    F.conv2d: _convolution(F.conv2d, 2),
    F.conv3d: _convolution(F.conv3d, 3),
    F.layer_norm: layer_norm,
    torch.layer_norm: layer_norm,
    F.rms_norm: rms_norm,
    torch.rms_norm: rms_norm,
    F.group_norm: group_norm,
    torch.group_norm: group_norm,
    F.instance_norm: instance_norm,
    F.batch_norm: batch_norm,
    torch.batch_norm: batch_norm,
    F.embedding: embedding,
}
