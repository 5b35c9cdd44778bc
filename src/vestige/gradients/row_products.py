"""Products with weights that every row has its own of: what vmap would do slowly, with copies, or
wrongly. Linear and 2d convolution write their weights' gradients straight to where they belong.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vestige.errors import UnsupportedModel
from vestige.gradients.rules.convolution import NUMBERS_AT_ONCE, Geometry


class RowProducts(TorchFunctionMode):
    """Replaces what vmap does slowly, with copies, or wrongly; `sinks` by the weight's identity."""

    def __init__(self, sinks: Mapping[int, Tensor]) -> None:
        super().__init__()
        self._sinks: dict[int, Tensor | None] = dict(sinks)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, rule = kwargs or {}, _RULES.get(func)
        out = NotImplemented if rule is None else rule(self, *args, **kwargs)
        return func(*args, **kwargs) if out is NotImplemented else out

    def owns(self, weight: Tensor) -> bool:
        """Whether these are the rows' own weights."""
        return id(weight) in self._sinks

    def apply(self, input: Tensor, weight: Tensor, product: Any, bias: Tensor | None) -> Any:
        """`product` of all rows at once, unless something is cast on the way."""
        if input.dtype != weight.dtype or torch.is_autocast_enabled(input.device.type):
            return NotImplemented
        # The first use of a weight writes where its gradient belongs; autograd adds the others.
        sink, self._sinks[id(weight)] = self._sinks[id(weight)], None
        sink = sink if sink is not None and sink.dtype == weight.dtype else None
        out = _Product.apply(input, weight, product, sink)  # type: ignore[no-untyped-call]
        return out if bias is None else out.add_(bias)


def _linear(mode: RowProducts, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    return mode.apply(input, weight, _Linear(), bias) if mode.owns(weight) else NotImplemented


def _conv2d(
    mode: RowProducts,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Any:
    """The settings are stride, padding, dilation and groups."""
    if not mode.owns(weight) or input.ndim != 4 or len(input) != 1:
        return NotImplemented
    geometry = Geometry.of(weight, *settings, **named)
    if geometry.groups > 1 or any(left != right for left, right in geometry.padding):
        return NotImplemented
    shift = None if bias is None else bias[:, None, None]
    return mode.apply(input, weight, _Convolution(geometry), shift)


def _embedding(
    mode: RowProducts,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    **options: Any,
) -> Any:
    if not mode.owns(weight):
        return NotImplemented
    if options.get("max_norm") is not None or options.get("scale_grad_by_freq"):
        raise UnsupportedModel(
            "an embedding uses max_norm or scale_grad_by_freq, which depend on the other examples "
            "of the batch: build the layer without them."
        )
    out = F.embedding(input, weight)
    if padding_idx is None:
        return out
    # vmap forgets that the padding has no gradient.
    padding = (input == padding_idx % len(weight)).unsqueeze(-1)
    return torch.where(padding, out.detach(), out)


_RULES: dict[Any, Any] = {F.linear: _linear, F.conv2d: _conv2d, F.embedding: _embedding}


class _Product(torch.autograd.Function):
    """A product of every row with its own weight; under vmap it is called again with all rows."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, product: Any, sink: Tensor | None) -> Tensor:
        # Not as a view: the model may change in place only what is no view made in a Function.
        return torch.ops.aten._unsafe_view(*product.forward(x, w))  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.product, ctx.sink = inputs
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Any:
        if torch.is_grad_enabled():
            raise UnsupportedModel(
                "the closure differentiates a gradient (create_graph=True), which rows with "
                "weights of their own do not support: leave gradient penalties out of the loss."
            )
        x, w = ctx.saved_tensors
        gx = gw = None
        if ctx.needs_input_grad[0]:
            gx = ctx.product.input_gradient(x, w, g)
        if ctx.needs_input_grad[1]:
            gw = g.new_empty(w.shape) if ctx.sink is None else ctx.sink
            ctx.product.weight_gradient(x, g, gw)
        return gx, gw, None, None

    @staticmethod
    def vmap(info: Any, dims: Any, x: Tensor, w: Tensor, product: Any, sink: Any) -> Any:
        x = x.expand(info.batch_size, *x.shape) if dims[0] is None else x.movedim(dims[0], 0)
        return _Product.apply(x, w, product, sink), 0  # type: ignore[no-untyped-call]


def _shared(w: Tensor) -> bool:
    """Whether all rows have the same weights."""
    return w.stride(0) == 0


def _three(values: Tensor) -> Tensor:
    """(n, ..., d) as (n, positions, d)."""
    return values.reshape(len(values), -1, values.shape[-1])


class _Linear:
    """x (n, ..., d) times w (n, p, d)."""

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, list[int]]:
        """The product, and the shape it should have."""
        out = _three(x) @ (w[0].t() if _shared(w) else w.transpose(1, 2))
        return out, [*x.shape[:-1], w.shape[1]]

    def input_gradient(self, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        """The gradient of x from that of the product."""
        return (_three(g) @ (w[0] if _shared(w) else w)).view(x.shape)

    def weight_gradient(self, x: Tensor, g: Tensor, into: Tensor) -> None:
        """Write the gradient of every row's weight."""
        torch.bmm(_three(g).transpose(1, 2), _three(x), out=into)


class _Convolution:
    """x (n, 1, c, ...) convolved with w (n, p, c, k, k)."""

    def __init__(self, geometry: Geometry) -> None:
        self._geometry = geometry
        padding = tuple(left for left, _ in geometry.padding)
        self._settings = geometry.stride, padding, geometry.dilation

    def forward(self, x: Tensor, w: Tensor) -> tuple[Tensor, list[int]]:
        """The convolution, and the shape it should have."""
        x, p = x.squeeze(1), w.shape[1]
        sizes = zip(x.shape[2:], self._geometry.kernel, *self._settings, strict=True)
        size = tuple((i + 2 * q - d * (k - 1) - 1) // s + 1 for i, k, s, q, d in sizes)
        if ordinary := self._ordinary(x, w, torch.Size(size).numel()):
            images, kernels, groups = ordinary
            out = F.conv2d(images, kernels, None, *self._settings, groups)
        else:
            out = x.new_empty(len(x), p, torch.Size(size).numel())
            for some in self._chunks(x, out.shape[2]):
                columns = self._geometry.columns(x[some], size)
                torch.bmm(w[some].flatten(2), columns, out=out[some])
        return out, [len(x), 1, p, *size]

    def input_gradient(self, x: Tensor, w: Tensor, g: Tensor) -> Tensor:
        """The gradient of x from that of the convolution."""
        images, g = x.squeeze(1), g.squeeze(1)
        positions = g[0, 0].numel()
        if ordinary := self._ordinary(images, w, positions):
            images, kernels, groups = ordinary
            g = g.reshape(len(images), -1, *g.shape[2:])
            options = *self._settings, False, [0, 0], groups, [True, False, False]
            out, _, _ = torch.ops.aten.convolution_backward(g, images, kernels, None, *options)
            return out.reshape(x.shape)  # type: ignore[no-any-return]
        out, (stride, padding, dilation) = torch.empty_like(images), self._settings
        for some in self._chunks(images, positions):
            fields = torch.bmm(w[some].flatten(2).transpose(1, 2), g[some].flatten(2))
            kernel, size = self._geometry.kernel, images.shape[2:]
            out[some] = F.fold(fields, size, kernel, dilation, padding, stride)
        return out.view(x.shape)

    def weight_gradient(self, x: Tensor, g: Tensor, into: Tensor) -> None:
        """Write the gradient of every row's weight."""
        x, g = x.squeeze(1), g.squeeze(1)
        for some in self._chunks(x, g[0, 0].numel()):
            columns = self._geometry.columns(x[some], tuple(g.shape[2:])).transpose(1, 2)
            torch.bmm(g[some].flatten(2), columns, out=into[some].flatten(2))

    def _ordinary(self, x: Tensor, w: Tensor, positions: int) -> tuple[Tensor, Tensor, int] | None:
        """Images, kernels and groups of one convolution for all rows, where that is fastest."""
        if _shared(w):
            return x, w[0], 1
        n, p, c = w.shape[:3]
        # A group for each row: oneDNN is good at it unless the weights outweigh the images.
        large = 2 * positions * (p + c) >= w[0].numel()
        if large and c % 16 == 0 and x.device.type == "cpu" and x.dtype == torch.float32:
            return x.reshape(1, n * c, *x.shape[2:]), w.flatten(0, 1), n
        return None

    def _chunks(self, x: Tensor, positions: int) -> Iterator[slice]:
        """Rows whose columns fit the cache together."""
        columns = x.shape[1] * torch.Size(self._geometry.kernel).numel() * positions
        step = max(1, NUMBERS_AT_ONCE.get(x.device.type, 2**21) // max(1, columns))
        return (slice(i, i + step) for i in range(0, len(x), step))
