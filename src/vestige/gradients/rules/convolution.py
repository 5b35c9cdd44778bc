"""Rule for convolutions: gradients as products with unfolded columns, or Gram matrices.

With a the (d, t) columns of an example's padded input (d = channels x kernel, t = output positions)
and g its (p, t) output gradient, the example's weight gradient is g a^T. Where t is large that
product is formed for a few examples at a time; where t is small its norm comes from two t x t Gram
matrices and the clipped sum from the ordinary weight gradient of the scaled output gradient, or, on
tensor cores, both from the fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.gradients.kernels import fused, reference
from vestige.gradients.refs import Ref, Uncovered
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import Uses, plain, rule
from vestige.gradients.uses import (
    PerExample,
    Use,
    add_product,
    gram_norms,
    product_squares,
    without,
    zero_rows,
)

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

# Numbers held at a time: about what a CPU's cache takes, many for a GPU.
NUMBERS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
COLUMNS_AT_ONCE = 2**27  # numbers, where tensor cores read them


@contextmanager
def _tf32_products() -> Iterator[None]:
    """float32 products on tensor cores, where convolutions are allowed them anyway."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


@dataclass(frozen=True)
class Geometry:
    """Stride, padding, dilation and groups of a convolution, padding as (left, right) per axis."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int

    @classmethod
    def of(
        cls,
        weight: Tensor,
        stride: int | tuple[int, ...] = 1,
        padding: str | int | tuple[int, ...] = 0,
        dilation: int | tuple[int, ...] = 1,
        groups: int = 1,
    ) -> Geometry:
        """Read the arguments of `F.conv1d`, `conv2d` or `conv3d`."""
        kernel = tuple(weight.shape[2:])
        axes = len(kernel)

        def spread(value: int | tuple[int, ...]) -> tuple[int, ...]:
            values = (value,) if isinstance(value, int) else tuple(value)
            return values * axes if len(values) == 1 else values

        dilation = spread(dilation)
        if isinstance(padding, str):
            span = [
                d * (k - 1) if padding == "same" else 0
                for d, k in zip(dilation, kernel, strict=True)
            ]
            pads = tuple((s // 2, s - s // 2) for s in span)
        else:
            pads = tuple((p, p) for p in spread(padding))
        return cls(kernel, spread(stride), pads, dilation, groups)

    def pad(self, x: Tensor) -> Tensor:
        """`x` with its zero border."""
        if not any(left or right for left, right in self.padding):
            return x
        return F.pad(x, [edge for pair in reversed(self.padding) for edge in pair])

    def columns(self, x: Tensor, out: tuple[int, ...]) -> Tensor:
        """The receptive fields of `x` (n, channels, ...) as (n * groups, d, t): one copy."""
        x = self.pad(x).contiguous()
        n, channels = x.shape[:2]
        by_image, by_channel, *by_axis = x.stride()
        size = (n, channels, *self.kernel, *out)
        taps = (s * d for s, d in zip(by_axis, self.dilation, strict=True))
        moves = (s * k for s, k in zip(by_axis, self.stride, strict=True))
        view = x.as_strided(size, (by_image, by_channel, *taps, *moves))
        positions = torch.Size(out).numel()
        fields = channels // self.groups * torch.Size(self.kernel).numel()
        return view.reshape(n * self.groups, fields, positions)

    def unfolding(self, out: tuple[int, ...]) -> fused.Unfolding:
        """The same as the fused kernels take it, a convolution of one axis as one of two."""
        first = [left for left, _ in self.padding]
        one = len(out) == 1
        pairs = [self.kernel, self.stride, tuple(first), self.dilation, out]
        fill = (1, 1, 0, 1, 1)
        return fused.Unfolding(*((f, *p) if one else p for f, p in zip(fill, pairs, strict=True)))

    def weight_gradient(self, x: Tensor, g: Tensor, weight: Tensor) -> Tensor:
        """The ordinary weight gradient, summed over the examples."""
        symmetric = all(left == right for left, right in self.padding)
        inputs = x if symmetric else self.pad(x)
        padding = [left for left, _ in self.padding] if symmetric else [0] * len(self.kernel)
        _, gradient, _ = torch.ops.aten.convolution_backward(
            g,
            inputs,
            weight,
            None,
            list(self.stride),
            padding,
            list(self.dilation),
            False,
            [0] * len(self.kernel),
            self.groups,
            [False, True, False],
        )
        return gradient  # type: ignore[no-any-return]


class Convolved(Use):
    """The weight's use in a convolution of x (n, channels, ...) with output gradient g."""

    def __init__(
        self, x: Tensor, g: Tensor, weight: Tensor, geometry: Geometry, product: bool = False
    ) -> None:
        self.x, self.g, self.weight, self.geometry = x, g, weight, geometry
        self.shape, self.dtype = tuple(weight.shape), torch.promote_types(g.dtype, torch.float32)
        self.out = tuple(g.shape[2:])
        self._product: Tensor | None = None
        self._want_product = product
        self._factors: tuple[Tensor, Tensor] | None = None
        self._fused = (
            geometry.groups == 1
            and len(self.out) <= 2
            and x.dtype == g.dtype
            and fused.multiplies(x, torch.backends.cudnn.allow_tf32)
            and min(*x.shape, *g.shape) > 0
            and fused.reachable(x)
            and weight[0].numel() * (self._positions + 2 * fused.ALIGNED) < fused.REACH
        )
        if not self._fused:
            self.x, self.g = x.to(self.dtype), g.to(self.dtype)

    @property
    def _positions(self) -> int:
        return torch.Size(self.out).numel()

    @property
    def _gram_ratio(self) -> float:
        """Numbers in the columns and the output gradient over numbers in their product."""
        filters, fields = self.shape[0] // self.geometry.groups, self.weight[0].numel()
        return self._positions * (filters + fields) / (filters * fields)

    def pieces(self) -> Iterator[tuple[slice, Use]] | None:
        # Products of a few examples stay in a CPU's cache; Gram matrices must be much smaller to
        # win. A GPU is better off with all examples at once.
        if self._gram_ratio <= 0.5 or self.x.device.type != "cpu":
            return None
        weight, geometry = self.weight, self.geometry
        return (
            (rows, Convolved(self.x[rows], self.g[rows], weight, geometry, product=True))
            for rows in self._chunks(weight.numel())
        )

    def square_norms(self) -> Tensor:
        if self._gram_ratio <= 1 and not self._want_product:
            return self._certified_norms() if self._fused else self._norms_from_grams()
        at_once = COLUMNS_AT_ONCE if self._fused else None
        products = [self._products(r) for r in self._chunks(self.weight.numel(), at_once)]
        self._product = torch.cat(products) if len(products) > 1 else products[0]
        self.x = self.g = self.weight.new_empty(0)  # the product says all
        return product_squares(self._product)

    def _certified_norms(self) -> Tensor:
        norms, slacks = [], []
        for rows in self._chunks(at_once=2 * COLUMNS_AT_ONCE):
            a, g = self._as_multiplied(rows)
            squares, slack = fused.square_norms(a, g)
            norms.append(squares)
            slacks.append(slack)
            self._factors = a, g
        if len(norms) > 1:
            self._factors = None
        self.slack = torch.cat(slacks)
        return torch.cat(norms)

    def _as_multiplied(self, rows: slice) -> tuple[Tensor, Tensor]:
        """Columns and output gradients, (n, t, d) and (n, t, p), as the fused kernels take them."""
        a = fused.unfolded(self._images(rows), self.geometry.unfolding(self.out), rounded=True)
        return fused.of_one_length(a, fused.arranged(self.g[rows].flatten(2).transpose(1, 2)))

    def _images(self, rows: slice) -> Tensor:
        return self.x[rows] if len(self.out) == 2 else self.x[rows].unsqueeze(2)

    def wait(self) -> None:
        self._factors = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(factor.nbytes for factor in self._factors or ())

    def _chunks(self, extra: int = 0, at_once: int | None = None) -> list[slice]:
        """Examples whose columns (and `extra` numbers each) fit the cache together."""
        columns = self.weight[0].numel() * self.geometry.groups * self._positions
        numbers = at_once or NUMBERS_AT_ONCE.get(self.x.device.type, 2**21)
        size = numbers // (columns + extra)
        return [slice(i, i + max(1, size)) for i in range(0, len(self.x), max(1, size))]

    def _products(self, rows: slice) -> Tensor:
        g = self.g[rows]
        if self._fused:
            how = self.geometry.unfolding(self.out)
            a = fused.unfolded(self._images(rows), how, rounded=False)[:, : self._positions]
            with _tf32_products():
                product = reference.product_sums(a, g.flatten(2).transpose(1, 2))
            return product.view(len(g), *self.shape)
        columns = self.geometry.columns(self.x[rows], self.out)
        factors = g.reshape(columns.shape[0], -1, columns.shape[2])
        return torch.bmm(factors, columns.transpose(1, 2)).view(len(g), *self.shape)

    def _norms_from_grams(self) -> Tensor:
        norms = []
        groups = self.geometry.groups
        for rows in self._chunks():
            a = self.geometry.columns(self.x[rows].double(), self.out).transpose(1, 2)
            g = self.g[rows].double().reshape(a.shape[0], -1, a.shape[1]).transpose(1, 2)
            norms.append(gram_norms(a, g, self.dtype, self.rounding).view(-1, groups).sum(1))
        return torch.cat(norms)

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        if self._product is not None:
            add_product(self._product, factors, total)
            return
        if not self._fused:
            scaled = self.g * factors.view(-1, *[1] * (self.g.ndim - 1))
            total.add_(self.geometry.weight_gradient(self.x, scaled, self.weight))
            return
        flat = total.view(len(total), -1) if total.is_contiguous() else None
        into = total.new_zeros(len(total), total[0].numel()) if flat is None else flat
        for rows in self._chunks(at_once=2 * COLUMNS_AT_ONCE):
            a, g = self._factors or self._as_multiplied(rows)
            fused.add_weighted(a, g, factors[rows], into)
        if flat is None:
            total.add_(into.view(total.shape))

    def dense(self) -> Tensor:
        if self._product is not None:
            return self._product
        return self._products(slice(None))

    def drop(self, bad: Tensor) -> None:
        if self._product is not None:
            self._product = without(self._product, bad)
        elif not self._fused:  # the fused sum passes over a factor of zero
            self.x, self.g = zero_rows(self.x, bad), zero_rows(self.g, bad)


@rule(F.conv1d, F.conv2d, F.conv3d)
def convolution(
    capture: Capture,
    function: Any,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *settings: Any,
    **named: Any,
) -> Any:
    """A convolution; `settings` and `named` are stride, padding, dilation and groups."""
    w, b = capture.find(weight), capture.find(bias)
    if not (w or b):
        return NotImplemented
    rows = rows_first(capture, input, [w, b], weight.ndim)
    kernel = plain(w, weight)
    input = capture.as_autocast(input)
    out = function(input, kernel, plain(b, bias), *settings, **named)
    geometry = Geometry.of(weight, *settings, **named)
    saved = capture.saved(input) if w else None

    def uses(g: Tensor) -> Uses:
        g, dtype = capture.as_factor(g), capture.dtype
        parts: Uses = []
        if b:
            parts.append(b.use(PerExample(g.flatten(2).sum(2, dtype=dtype))))
        if w and saved:
            x = capture.as_factor(saved())
            parts.append(w.use(Convolved(x, g, kernel.to(dtype), geometry)))
        return parts

    out = capture.tap(out, [w, b], uses)
    capture.follows(rows, input, out)
    return out


def rows_first(
    capture: Capture, input: Tensor, refs: Sequence[Ref | None], ndim: int | None = None
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
