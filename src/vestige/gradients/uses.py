"""What one use of a parameter in the forward pass contributes to each example's gradient.

A `Use` stands for the per-example gradients (n, *shape) of one parameter without holding them: it
knows their squared norms and their weighted sum, which is all that clipping needs. `Outer` and
`LookedUp` work from the factors that autograd already has (input and output gradient); `PerExample`
holds the numbers themselves, for parameters that are small (biases, norm layers) or rare.

Guarantee: `square_norms`, in float64, never understates the norm of what `add_weighted` adds, up to
rounding of a few parts in 10^7. Where terms cancel, the sum is less exact than the norm, so a bound
on its rounding error is added to every norm that comes from factors.

Papers: Goodfellow 2015 (norms of outer products), Li et al. 2022 (ghost norm), Bu et al. 2023
(book-keeping).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vestige.gradients.grams import COARSE, gram_norms, limited, rounding_unit
from vestige.gradients.kernels import fused, reference
from vestige.gradients.kernels.bounds import accumulation, of_looks


def zero_rows(values: Tensor, bad: Tensor) -> Tensor:
    """A copy of `values` whose rows marked in `bad` are zero. (Multiplying would keep 0*inf.)"""
    return torch.where(bad.view(-1, *[1] * (values.ndim - 1)), 0, values)


def row_squares(values: Tensor, factor: bool = False) -> Tensor:
    """The squared norm of each row, (n,), in float64.

    With `factor` the rows are factors of a product: see `limited`.
    """
    flat = values if values.ndim == 2 else values.reshape(len(values), -1)
    width = flat.shape[1]
    if fused.multiplies(flat, tf32=True) and flat.numel() > 0 and flat.stride(1) == 1:
        return fused.row_squares(flat, limited=factor)
    if flat.device.type == "cpu" and flat.dtype == torch.float32 and width > 256:
        # A long float32 sum of equal squares rounds all one way. Short blocks and torch.sum, which
        # adds in a tree, do not, and are fast; they serve rows that neither over- nor underflow.
        if width % 32 == 0:
            blocks = torch.linalg.vector_norm(flat.unflatten(1, (-1, 32)), dim=2)
            squares: Tensor = blocks.square_().sum(1).double()
        else:
            squares = flat.square().sum(1).double()
        odd = ~((squares > 1e-30) & (squares < 1e30))
        if not bool(odd.any()):
            return squares
        squares[odd] = torch.linalg.vector_norm(flat[odd], dim=1, dtype=torch.float64).square_()
    else:
        squares = torch.linalg.vector_norm(flat, dim=1, dtype=torch.float64).square_()
    return limited(squares, values.dtype) if factor else squares


def product_squares(product: Tensor) -> Tensor:
    """`row_squares` of products that are held here alone: on a GPU what is not finite becomes 0."""
    flat = product.flatten(1)
    emptied = fused.multiplies(product, tf32=True) and product.numel() > 0
    return fused.row_squares(flat, empty=True) if emptied else row_squares(product)


def without(product: Tensor, bad: Tensor) -> Tensor:
    """The same products with the rows marked in `bad` gone: a factor of zero is enough on a GPU."""
    return product if fused.multiplies(product, tf32=True) else zero_rows(product, bad)


def add_product(values: Tensor, factors: Tensor, total: Tensor) -> None:
    """Add sum_i factors[i] * values[i] to `total`."""
    flat = values.reshape(len(factors), -1).t()
    if total.is_contiguous():
        total.view(-1).addmv_(flat, factors)
    else:
        total.add_(torch.mv(flat, factors).view(total.shape))


class Use(ABC):
    """The per-example gradients (n, *shape) of one use of one parameter, in whatever form."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    rounding = 0.0  # of the sum's arithmetic, relative: see `gram_norms`
    slack: Tensor | None = None  # what certified norms hold for the rounding of the sum, (n,)
    small = False  # whether many of them are best handled as one tensor

    @property
    def nbytes(self) -> int:
        """The memory that it holds."""
        return sum(value.nbytes for value in vars(self).values() if isinstance(value, Tensor))

    def summed_with(self, rounding: float) -> None:
        """The sum of this use will be rounded so much; to be said before its norms are taken."""
        self.rounding = rounding

    @abstractmethod
    def square_norms(self) -> Tensor:
        """The squared norm of each example's gradient, (n,), in float64."""

    @abstractmethod
    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        """Add sum_i factors[i] * gradient_i to `total`, a tensor of the parameter's shape."""

    @abstractmethod
    def dense(self) -> Tensor:
        """The gradients themselves, (n, *shape)."""

    @abstractmethod
    def drop(self, bad: Tensor) -> None:
        """Forget the examples marked in `bad` (n,), whose factors will be zero."""

    def wait(self) -> None:  # noqa: B027 (most have nothing to forget)
        """Nothing more is asked until the backward pass ends: what can be made again may go."""

    def pieces(self) -> Iterator[tuple[slice, Use]] | None:
        """The use of a few examples at a time, where that is cheaper than all of them at once."""
        return None


class PerExample(Use):
    """Gradients held as they are: (n, *shape)."""

    small = True

    def __init__(self, values: Tensor, squares: Tensor | None = None) -> None:
        self.values, self.squares = values, squares
        self.shape, self.dtype = tuple(values.shape[1:]), values.dtype

    def square_norms(self) -> Tensor:
        return row_squares(self.values) if self.squares is None else self.squares

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        add_product(self.values, factors, total)

    def dense(self) -> Tensor:
        return self.values

    def drop(self, bad: Tensor) -> None:
        self.values = zero_rows(self.values, bad)


class Outer(Use):
    """Gradients that are sums of outer products: sum_t g[i, t] a[i, t]^T, of shape (p, d).

    On a GPU, in bf16 or where TF32 is allowed, norms and sums over positions are certified and
    computed in that precision (`kernels`, docs/numerics.md).
    """

    def __init__(self, a: Tensor, g: Tensor, g_squares: Tensor | None = None) -> None:
        # (n, d) means one product per example; (n, t, d) a sum over t of them.
        self.shape, self._g_squares = (g.shape[-1], a.shape[-1]), g_squares
        self.dtype = torch.promote_types(g.dtype, torch.float32)
        narrow = a.ndim == 3 and a.dtype == g.dtype
        self.a, self.g = (a, g) if narrow else (a.to(self.dtype), g.to(self.dtype))
        self._product: Tensor | None = None
        self._certified = False  # whether the factors are as the fused kernels multiply them

    def square_norms(self) -> Tensor:
        if self.a.ndim == 2:
            squares = self._g_squares
            squares = row_squares(self.g, factor=True) if squares is None else squares
            return row_squares(self.a, factor=True).mul_(squares)
        t, (p, d) = self.a.shape[1], self.shape
        if t * (p + d) > p * d:
            # The product is smaller than its factors: keep it instead of them.
            self._product = self.dense()
            self.a = self.g = self._product.new_empty(0)
            return product_squares(self._product)
        if not fused.covers(self.a, self.g):
            factors = self.a.double(), self.g.double()
            squares, self.slack = gram_norms(*factors, self.dtype, self.rounding)
            return squares
        self.a, self.g = fused.arranged_pair(self.a, self.g)
        self._certified = True
        squares, self.slack = fused.square_norms(self.a, self.g)
        return squares

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        if self._product is not None:
            add_product(self._product, factors, total)
        elif self._certified:
            fused.add_weighted(self.a, self.g, factors, total)
        else:
            scaled = self.g * factors.view(-1, *[1] * (self.g.ndim - 1))
            total.addmm_(scaled.flatten(0, -2).t(), self.a.flatten(0, -2).to(self.dtype))

    def dense(self) -> Tensor:
        if self._product is not None:
            return self._product
        if self.a.ndim == 2:
            return self.g.unsqueeze(2) * self.a.unsqueeze(1)
        p, d = self.shape
        return reference.product_sums(self.a, self.g)[:, :p, :d]

    def drop(self, bad: Tensor) -> None:
        if self._product is not None:
            self._product = without(self._product, bad)
        elif not self._certified:  # the fused sum passes over a factor of zero
            self.a, self.g = zero_rows(self.a, bad), zero_rows(self.g, bad)


class LookedUp(Use):
    """Gradients of a looked-up table: row indices[i, t] receives g[i, t]."""

    def __init__(self, indices: Tensor, g: Tensor, rows: int) -> None:
        n = indices.shape[0]
        self.indices = indices.reshape(n, -1)
        self.g = g.reshape(n, self.indices.shape[1], g.shape[-1])
        self.shape, self.dtype = (rows, g.shape[-1]), g.dtype

    def square_norms(self) -> Tensor:
        # Two looks at the same row add up before the norm is taken.
        same = self.indices.unsqueeze(1) == self.indices.unsqueeze(2)
        gram = torch.bmm(g := self.g.double(), g.transpose(1, 2))
        lengths = limited(gram.diagonal(dim1=1, dim2=2), self.dtype).sqrt()
        grams = lengths.sum(1).square_().mul_(rounding_unit(self.g.dtype, self.shape[1]))
        norms = gram.mul_(same).sum((1, 2)).clamp_(min=0).add_(grams).sqrt_()
        self.slack = of_looks(gram.copy_(same), lengths, self.dtype)
        return norms.add_(self.slack).square_()

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        scaled = self.g * factors.view(-1, 1, 1)
        total.index_add_(0, self.indices.reshape(-1), scaled.flatten(0, 1))

    def dense(self) -> Tensor:
        n, (rows, width) = len(self.g), self.shape
        table = self.g.new_zeros(n, rows, width)
        return table.scatter_add_(1, self.indices.unsqueeze(2).expand_as(self.g), self.g)

    def drop(self, bad: Tensor) -> None:
        self.g = zero_rows(self.g, bad)


class Viewed(Use):
    """A use of a strided view of the parameter (a slice, a chunk, a transpose)."""

    def __init__(self, use: Use, parameter: Tensor, view: Tensor) -> None:
        self.use = use
        self.shape, self.dtype = tuple(parameter.shape), use.dtype
        self.size, self.stride = tuple(view.shape), view.stride()
        self.offset = view.storage_offset() - parameter.storage_offset()

    @property
    def nbytes(self) -> int:
        return self.use.nbytes

    def span(self) -> tuple[int, int]:
        """First and last position in the flattened parameter that the view touches."""
        last = sum((int(s) - 1) * int(k) for s, k in zip(self.size, self.stride, strict=True))
        return int(self.offset), int(self.offset) + last

    def summed_with(self, rounding: float) -> None:
        self.use.summed_with(rounding)

    def square_norms(self) -> Tensor:
        return self.use.square_norms()

    def wait(self) -> None:
        self.use.wait()

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        at = total.storage_offset() + self.offset
        self.use.add_weighted(factors, total.as_strided(self.size, self.stride, at))

    def dense(self) -> Tensor:
        part = self.use.dense()
        n, size = len(part), torch.Size(self.shape).numel()
        whole = part.new_zeros(n, size)
        whole.as_strided((n, *self.size), (size, *self.stride), self.offset).copy_(part)
        return whole.view(n, *self.shape)

    def drop(self, bad: Tensor) -> None:
        self.use.drop(bad)


class Tied(Use):
    """Several uses of one parameter (tied weights, a layer called twice, time steps): their sum."""

    def __init__(self, uses: Sequence[Use]) -> None:
        self.uses = _merge_outer(uses)
        self.shape, self.dtype = uses[0].shape, uses[0].dtype
        self._dense: Tensor | None = None

    def summed_with(self, rounding: float) -> None:
        super().summed_with(rounding)
        for use in self.uses:
            use.summed_with(rounding)

    def square_norms(self) -> Tensor:
        if len(self.uses) == 1:
            return self.uses[0].square_norms()
        pairs = [(u, v) for i, u in enumerate(self.uses) for v in self.uses[:i]]
        if not all(_has_cross(u, v) for u, v in pairs):
            self._dense = self.dense()
            return row_squares(self._dense)
        # Norms first: they may round the factors, and cross terms are of what is added.
        norms = [u.square_norms() for u in self.uses]
        crosses = [_cross(u, v) for u, v in pairs]
        total = torch.stack(norms).sum(0)
        # Cancellation between the uses: what the sum loses to rounding, as in `gram_norms`.
        unit = rounding_unit(self.dtype, sum(self.shape))
        terms = torch.stack(norms).sqrt().sum(0)
        for cross in crosses:
            total = total + 2 * cross
        joint = total.clamp_(min=0).add_(terms.square().mul_(4 * unit)).sqrt_()
        slacks = [u.slack for u in self.uses if u.slack is not None]
        coarse = len(slacks) < len(self.uses) and self.rounding > COARSE
        # Looks are added one after the other, to what is there of the other uses.
        looks = max((u.indices.shape[1] for u in self.uses if isinstance(u, LookedUp)), default=0)
        joint.add_(terms.mul_(accumulation(looks, self.dtype) + self.rounding * coarse))
        for slack in slacks:  # twice: cross terms round, too, by less than the sum
            joint.add_(slack, alpha=2)
        return joint.square_()

    def add_weighted(self, factors: Tensor, total: Tensor) -> None:
        if self._dense is not None:
            PerExample(self._dense).add_weighted(factors, total)
            return
        for use in self.uses:
            use.add_weighted(factors, total)

    def dense(self) -> Tensor:
        if self._dense is not None:
            return self._dense
        return torch.stack([u.dense().reshape(-1, *self.shape) for u in self.uses]).sum(0)

    def drop(self, bad: Tensor) -> None:
        if self._dense is not None:
            self._dense = zero_rows(self._dense, bad)
        for use in self.uses:
            use.drop(bad)


def _merge_outer(uses: Sequence[Use]) -> list[Use]:
    """Outer products of one parameter are one longer sum of outer products."""
    outers = [u for u in uses if type(u) is Outer]
    if len(outers) < 2:
        return list(uses)
    a = torch.cat([u.a if u.a.ndim == 3 else u.a.unsqueeze(1) for u in outers], dim=1)
    g = torch.cat([u.g if u.g.ndim == 3 else u.g.unsqueeze(1) for u in outers], dim=1)
    return [Outer(a, g), *(u for u in uses if type(u) is not Outer)]


def _has_cross(left: Use, right: Use) -> bool:
    """Whether there is a cheap form of the inner products <left_i, right_i>."""
    if isinstance(left, Viewed) and isinstance(right, Viewed):
        (low, high), (low2, high2) = left.span(), right.span()
        return high < low2 or high2 < low
    return {type(left), type(right)} == {Outer, LookedUp}


def _cross(left: Use, right: Use) -> Tensor | float:
    """The inner products, (n,), of what is added: asked for after the norms."""
    table, outer = (left, right) if isinstance(left, LookedUp) else (right, left)
    if not isinstance(table, LookedUp) or not isinstance(outer, Outer):
        return 0.0  # views without a number in common
    if outer._product is not None:
        rows = table.indices.unsqueeze(2).expand_as(table.g)
        return (outer._product.gather(1, rows).double() * table.g.double()).sum((1, 2))
    # Row indices[t] of sum_s g_s a_s^T is sum_s g_s[indices[t]] a_s.
    g = outer.g if outer.g.ndim == 3 else outer.g.unsqueeze(1)
    a = outer.a if outer.a.ndim == 3 else outer.a.unsqueeze(1)
    picked = g.gather(2, table.indices.unsqueeze(1).expand(-1, g.shape[1], -1)).double()
    a = a[..., : outer.shape[1]].double()
    return (picked * torch.bmm(a, table.g.double().transpose(1, 2))).sum((1, 2))
