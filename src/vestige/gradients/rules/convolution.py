"""Rule for convolutions: gradients as products with unfolded columns, or Gram matrices.

With a the (d, t) columns of an example's padded input (d = channels x kernel, t = output positions)
and g its (p, t) output gradient, the example's weight gradient is g a^T. Where t is large that
product is formed for a few examples at a time; where t is small its norm comes from two t x t Gram
matrices and the clipped sum from the ordinary weight gradient of the scaled output gradient, or, on
tensor cores, both from the fused kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.gradients.grams import gram_norms
from vestige.gradients.kernels import fused, reference
from vestige.gradients.precision import convolutions_in_tf32, products
from vestige.gradients.refs import Ref, Uncovered
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import Uses, plain, rule
from vestige.gradients.uses import (
    PerExample,
    Use,
    add_product,
    product_squares,
    without,
    zero_rows,
)

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

# Numbers held at a time: about what a CPU's cache takes, many for a GPU.
NUMBERS_AT_ONCE = {"cpu": 2**21, "cuda": 2**26}
COLUMNS_AT_ONCE = 2**27  # numbers, where tensor cores read them


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

    def columns(self, x: Tensor, out: tuple[int, ...], images: int = 1) -> Tensor:
        """The receptive fields of `x` (n * images, channels, ...) as (n * groups, d, images * t),
        where an example has so many images: one copy."""
        x = self.pad(x).contiguous()
        n, channels = len(x) // images, x.shape[1]
        by_image, by_channel, *by_axis = x.stride()
        size = (n, channels, *self.kernel, images, *out)
        taps = (s * d for s, d in zip(by_axis, self.dilation, strict=True))
        moves = (s * k for s, k in zip(by_axis, self.stride, strict=True))
        view = x.as_strided(size, (images * by_image, by_channel, *taps, by_image, *moves))
        positions = torch.Size(out).numel() * images
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
    """The weight's use in a convolution of x (n * images, channels, ...) with output gradient g.

    An example has so many `images`, one after the other: one, but in a unit of several rows.
    """

    def __init__(
        self,
        x: Tensor,
        g: Tensor,
        weight: Tensor,
        geometry: Geometry,
        product: bool = False,
        images: int = 1,
    ) -> None:
        self.x, self.g, self.weight, self.geometry = x, g, weight, geometry
        self.shape, self.dtype = tuple(weight.shape), torch.promote_types(g.dtype, torch.float32)
        self.out, self.images = tuple(g.shape[2:]), images
        self._product: Tensor | None = None
        self._want_product = product
        self._factors: tuple[Tensor, Tensor] | None = None
        self._fused = (
            geometry.groups == 1
            and len(self.out) <= 2
            and x.dtype == g.dtype
            and fused.multiplies(x, convolutions_in_tf32())
            and min(*x.shape, *g.shape) > 0
            and fused.reachable(x)
            and weight[0].numel() * (self._positions + images * 2 * fused.ALIGNED) < fused.REACH
        )
        if not self._fused:
            self.x, self.g = x.to(self.dtype), g.to(self.dtype)

    def of_units(self, images: int, g: Tensor) -> Convolved:
        """The same where so many rows are one example, with this output gradient."""
        return Convolved(self.x, g, self.weight, self.geometry, images=images)

    @property
    def _positions(self) -> int:
        """Of an example: those of all its images."""
        return torch.Size(self.out).numel() * self.images

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
        return ((some, self._piece(some)) for some in self._chunks(self.weight.numel()))

    def _piece(self, some: slice) -> Convolved:
        x, g = self._of(self.x, some), self._of(self.g, some)
        return Convolved(x, g, self.weight, self.geometry, product=True, images=self.images)

    def _of(self, values: Tensor, some: slice) -> Tensor:
        """The images of some examples."""
        return values[some.start * self.images : some.stop * self.images]

    def square_norms(self) -> Tensor:
        if self._gram_ratio <= 1 and not self._want_product:
            return self._certified_norms() if self._fused else self._norms_from_grams()
        at_once = COLUMNS_AT_ONCE if self._fused else None
        products = [self._products(some) for some in self._chunks(self.weight.numel(), at_once)]
        self._product = torch.cat(products) if len(products) > 1 else products[0]
        self.x = self.g = self.weight.new_empty(0)  # the product says all
        return product_squares(self._product)

    def _certified_norms(self) -> Tensor:
        norms, slacks = [], []
        for some in self._chunks(at_once=2 * COLUMNS_AT_ONCE):
            a, g = self._as_multiplied(some)
            squares, slack = fused.square_norms(a, g)
            norms.append(squares)
            slacks.append(slack)
            self._factors = a, g
        if len(norms) > 1:
            self._factors = None
        self.slack = torch.cat(slacks)
        return torch.cat(norms)

    def _as_multiplied(self, some: slice) -> tuple[Tensor, Tensor]:
        """Columns and output gradients, (n, t, d) and (n, t, p), as the fused kernels take them."""
        a, g = self._unfolded(some, rounded=True), self._of(self.g, some).flatten(2).transpose(1, 2)
        if self.images == 1:
            return fused.of_one_length(a, fused.arranged(g))
        t = g.shape[1]  # behind them an image's columns have positions of zeros
        return fused.arranged_pair(self._joined(a[:, :t]), self._joined(g))

    def _unfolded(self, some: slice, rounded: bool) -> Tensor:
        x = self._of(self.x, some)
        images = x if len(self.out) == 2 else x.unsqueeze(2)
        return fused.unfolded(images, self.geometry.unfolding(self.out), rounded)

    def _joined(self, values: Tensor) -> Tensor:
        """Factors of images (n * images, t, d) as those of examples, (n, images * t, d)."""
        return values.reshape(len(values) // self.images, -1, values.shape[2])

    def wait(self) -> None:
        self._factors = None

    @property
    def nbytes(self) -> int:
        return super().nbytes + sum(factor.nbytes for factor in self._factors or ())

    def _chunks(self, extra: int = 0, at_once: int | None = None) -> list[slice]:
        """Examples whose columns (and `extra` numbers each) fit the cache together."""
        columns = self.weight[0].numel() * self.geometry.groups * self._positions
        numbers = at_once or NUMBERS_AT_ONCE.get(self.x.device.type, 2**21)
        size = max(1, numbers // (columns + extra))
        count = len(self.x) // self.images
        return [slice(i, min(i + size, count)) for i in range(0, count, size)]

    def _products(self, some: slice) -> Tensor:
        g = self._of(self.g, some)
        if self._fused:
            factors = g.flatten(2).transpose(1, 2)
            a = self._unfolded(some, rounded=False)[:, : factors.shape[1]]
            with products("tf32"):  # which convolutions are allowed
                product = reference.product_sums(self._joined(a), self._joined(factors))
        else:
            columns = self.geometry.columns(self._of(self.x, some), self.out, self.images)
            product = torch.bmm(self._by_group(g, columns), columns.transpose(1, 2))
        return product.view(some.stop - some.start, *self.shape)

    def _by_group(self, g: Tensor, columns: Tensor) -> Tensor:
        """Output gradients (n * images, p, ...) beside `columns`: (n * groups, p, images * t)."""
        if self.images > 1:
            g = g.flatten(2).unflatten(0, (-1, self.images)).transpose(1, 2)
        return g.reshape(len(columns), -1, columns.shape[2])

    def _norms_from_grams(self) -> Tensor:
        norms, slacks, groups = [], [], self.geometry.groups
        for some in self._chunks():
            x, g = self._of(self.x, some).double(), self._of(self.g, some).double()
            columns = self.geometry.columns(x, self.out, self.images)
            a, g = columns.transpose(1, 2), self._by_group(g, columns).transpose(1, 2)
            squares, slack = gram_norms(a, g, self.dtype, self.rounding)
            norms.append(squares.view(-1, groups).sum(1))
            slacks.append(slack.view(-1, groups).sum(1))
        self.slack = torch.cat(slacks)
        return torch.cat(norms)

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        if self._product is not None:
            add_product(self._product, factors, total)
            return
        if not self._fused:
            scaled = self.g * self._by_image(factors).view(-1, *[1] * (self.g.ndim - 1))
            total.add_(self.geometry.weight_gradient(self.x, scaled, self.weight))
            return
        flat = total.view(len(total), -1) if total.is_contiguous() else None
        into = total.new_zeros(len(total), total[0].numel()) if flat is None else flat
        for some in self._chunks(at_once=2 * COLUMNS_AT_ONCE):
            a, g = self._factors or self._as_multiplied(some)
            fused.add_weighted(a, g, factors[some], into)
        if flat is None:
            total.add_(into.view(total.shape))

    def _by_image(self, values: Tensor) -> Tensor:
        """What examples have, for each of their images."""
        return values if self.images == 1 else values.repeat_interleave(self.images)

    def dense(self) -> Tensor:
        if self._product is not None:
            return self._product
        return self._products(slice(0, len(self.x) // self.images))

    def drop(self, bad: Tensor) -> None:
        if self._product is not None:
            self._product = without(self._product, bad)
        elif not self._fused:  # the fused sum passes over a factor of zero
            bad = self._by_image(bad)
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
