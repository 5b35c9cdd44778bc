"""Certified norms and clipped sums in torch: the reference of the fused kernels, for any device.

Each record's G is formed (n p d numbers). Inputs are (n, t, d) and (n, t, p), in bf16 or float32,
and count as given. `product_sums` takes float64, too.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vestige.gradients.kernels.bounds import (
    SMALLEST,
    RowTerms,
    Shape,
    accumulation,
    certified,
    underflow,
)


def round_to_tf32(values: Tensor) -> Tensor:
    """float32 numbers with ten explicit bits of significand, rounded to nearest."""
    bits = values.view(torch.int32)
    rounded = bits.add(0x1000).bitwise_and_(~0x1FFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def product_sums(a: Tensor, g: Tensor) -> Tensor:
    """Each record's G = sum_t g[i, t] a[i, t]^T, (n, p, d), in float32 (or float64)."""
    return _wide(g.transpose(1, 2), a)


def product_norms(a: Tensor, g: Tensor) -> Tensor:
    """Certified squared norms, (n,), from each record's product: |G| <= |computed| + c_t S."""
    shape, dtype = Shape.of(a, g), g.dtype
    terms = _row_terms(a, g, shape)
    product = product_sums(a, g).flatten(1)
    norms = torch.linalg.vector_norm(product, dim=1, dtype=torch.float64)
    norms = norms.mul_(1 + product.shape[1] * 2.0**-52)
    norms = norms.add_(accumulation(shape.t, dtype) * terms.products)
    return certified(norms + underflow(terms, shape), terms, shape, dtype)


def clip_factors(square_norms: Tensor, bound: float) -> Tensor:
    """min(1, bound / norm) in float32, rounded down; zero for a row that is not finite."""
    factors = square_norms.rsqrt().mul_(bound * (1 - 2.0**-21)).clamp_(max=1)
    # A denormal factor could be rounded up by much.
    return factors.masked_fill_(~(factors >= SMALLEST), 0).float()


def add_weighted(a: Tensor, g: Tensor, factors: Tensor, total: Tensor) -> None:
    """Add sum_i factors[i] G_i to `total` (p, d); each factor multiplies a finished product."""
    dropped = (factors == 0).view(-1, 1, 1)
    product = product_sums(a, g).masked_fill_(dropped, 0)
    total.add_(torch.mv(product.flatten(1).t(), factors.to(product.dtype)).view(total.shape))


def _row_terms(a: Tensor, g: Tensor, shape: Shape) -> RowTerms:
    """The sums of norms that every bound is relative to; what float64 rounds away is on top."""
    # The squares of float32 numbers all fit in float64.
    norms_a, norms_g = (torch.linalg.vector_norm(v, dim=2, dtype=torch.float64) for v in (a, g))
    up = 1 + (sum(shape) + 8) * 2.0**-52
    sums = ((norms_a * norms_g).sum(1), norms_a.sum(1), norms_g.sum(1))
    return RowTerms(*(s.mul_(up) for s in sums))


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """A batched product with float32 (or float64) sums and results.

    torch's `allow_bf16_reduced_precision_reduction` changes nothing here: it lets partial sums have
    the type of the result where that is narrower than the accumulator's, and both are float32.
    """
    if left.dtype != torch.bfloat16:
        return torch.bmm(left, right)
    if left.is_cuda:
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())
