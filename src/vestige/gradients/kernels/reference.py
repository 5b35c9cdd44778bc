"""Certified norms and clipped sums in torch: the reference of the fused kernels, for any device.

`product_norms` forms each record's G (n p d numbers); `gram_norms` two Gram matrices (2 n t^2
numbers). Inputs are (n, t, d) and (n, t, p), in bf16, float32 or float64, and count as given.

Papers: Goodfellow 2015 (norms of outer products), Li et al. 2022, arXiv 2110.05679 (Gram matrices).
"""

from __future__ import annotations

import torch
from torch import Tensor

from vestige.gradients.kernels.bounds import (
    FACTOR_ON_PRODUCT,
    SMALLEST,
    RowTerms,
    Shape,
    accumulation,
    certified,
    gram_slack,
    underflow,
)
from vestige.gradients.precision import products_in_tf32


def rounded(values: Tensor) -> Tensor:
    """`values` as a product sees them, rounded once.

    bf16, float64 and, where TF32 is off, float32 are multiplied as they are. float16 is widened:
    its exponents are too few to move powers of two about.
    """
    if values.dtype == torch.float16:
        return values.float()
    if values.dtype == torch.float32 and values.is_cuda and products_in_tf32():
        return round_to_tf32(values)
    return values


def round_to_tf32(values: Tensor) -> Tensor:
    """float32 numbers with ten explicit bits of significand, rounded to nearest."""
    bits = values.view(torch.int32)
    rounded = bits.add(0x1000).bitwise_and_(~0x1FFF).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values)


def row_terms(a: Tensor, g: Tensor) -> RowTerms:
    """The sums of norms that every bound is relative to."""
    return _row_terms(_position_norms(a), _position_norms(g), Shape.of(a, g))


def product_sums(a: Tensor, g: Tensor) -> Tensor:
    """Each record's G = sum_t g[i, t] a[i, t]^T, (n, p, d), in float32 (or float64)."""
    return _wide(g.transpose(1, 2), a)


def product_norms(a: Tensor, g: Tensor, factor_rounding: float = FACTOR_ON_PRODUCT) -> Tensor:
    """Certified squared norms, (n,), from each record's product: |G| <= |computed| + c_t S."""
    shape, dtype = Shape.of(a, g), g.dtype
    terms = row_terms(a, g)
    product = product_sums(a, g).flatten(1)
    norms = torch.linalg.vector_norm(product, dim=1, dtype=torch.float64)
    norms = norms.mul_(1 + product.shape[1] * 2.0**-52)
    norms = norms.add_(accumulation(shape.t, dtype) * terms.products)
    return certified(norms + underflow(terms, shape, dtype), terms, shape, dtype, factor_rounding)


def gram_norms(a: Tensor, g: Tensor, factor_rounding: float = FACTOR_ON_PRODUCT) -> Tensor:
    """Certified squared norms, (n,), from Gram matrices: |G|^2 <= max(computed, 0) + gamma S^2."""
    shape, dtype = Shape.of(a, g), g.dtype
    norms_a, norms_g = _position_norms(a), _position_norms(g)
    terms = _row_terms(norms_a, norms_g, shape)
    a, g, exponents = _balanced(a, g, norms_a, norms_g)
    grams = _wide(a, a.transpose(1, 2)).mul_(_wide(g, g.transpose(1, 2)))
    squares = grams.sum((1, 2), dtype=torch.float64).clamp_(min=0)
    sums = terms.products * _power_of_two(-exponents, torch.float64)
    squares = squares.add_(gram_slack(shape, dtype) * sums.square())
    norms = squares.sqrt_().mul_(_power_of_two(exponents, torch.float64))
    return certified(norms, terms, shape, dtype, factor_rounding)


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


def add_split(a: Tensor, g: Tensor, factors: Tensor, total: Tensor) -> None:
    """Add sum_i factors[i] G_i to `total`, by two bf16 products over all rows (`FACTOR_SPLIT`)."""
    dropped = (factors == 0).view(-1, 1, 1)
    a = a.masked_fill(dropped, 0).flatten(0, 1).unsqueeze(0)
    for part in split(g.float().mul_(factors.view(-1, 1, 1)).masked_fill_(dropped, 0)):
        total.add_(_wide(part.flatten(0, 1).t().unsqueeze(0), a).squeeze(0))


def split(values: Tensor) -> tuple[Tensor, Tensor]:
    """float32 numbers as the sum of two bf16 numbers, to 2^-16 of each."""
    high = values.bfloat16()
    return high, (values - high.float()).bfloat16()


def _row_terms(norms_a: Tensor, norms_g: Tensor, shape: Shape) -> RowTerms:
    """The sums over positions; what float64 rounds away is put on top."""
    up = 1 + (sum(shape) + 8) * 2.0**-52
    sums = ((norms_a * norms_g).sum(1), norms_a.sum(1), norms_g.sum(1))
    return RowTerms(*(s.mul_(up) for s in sums))


def _position_norms(values: Tensor) -> Tensor:
    """|values[i, t]|, (n, t), in float64."""
    if values.dtype != torch.float64:  # the squares of float32 numbers all fit
        norms: Tensor = torch.linalg.vector_norm(values, dim=2, dtype=torch.float64)
        return norms
    exponents = _exponents(values.abs().amax(2))
    scaled: Tensor = torch.linalg.vector_norm(_scaled(values, -exponents), dim=2)
    return _scaled(scaled.unsqueeze(2), exponents).squeeze(2)


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


def _balanced(
    a: Tensor, g: Tensor, norms_a: Tensor, norms_g: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Factors with the same products up to a power of two for each row, and its exponent.

    Each |a_t| becomes a number in [1/2, 1) and the power of two goes to g_t; then the largest
    |a_t| |g_t| of a row becomes one. No entry of a Gram matrix can overflow, and what underflows is
    far below the bound. Powers of two round nothing.
    """
    products = norms_a * norms_g
    of_rows = _exponents(products.amax(1))
    of_inputs = _exponents(norms_a)
    nothing = (products == 0).unsqueeze(2)  # a huge g_t where a_t is zero
    scaled_a = _scaled(a, -of_inputs).masked_fill_(nothing, 0)
    scaled_g = _scaled(g, of_inputs - of_rows.unsqueeze(1)).masked_fill_(nothing, 0)
    return scaled_a, scaled_g, of_rows


def _exponents(values: Tensor) -> Tensor:
    """e with values in [2^(e - 1), 2^e), of positive float64 numbers."""
    return (values.view(torch.int64) >> 52).bitwise_and_(0x7FF).sub_(1022)


def _scaled(values: Tensor, exponents: Tensor) -> Tensor:
    """values[i, t] 2^exponents[i, t]: in two steps, since one power may not fit."""
    wide = values.dtype if values.dtype == torch.float64 else torch.float32
    half = exponents.unsqueeze(2) >> 1
    result = values.to(wide) * _power_of_two(half, wide)
    return result.mul_(_power_of_two(exponents.unsqueeze(2) - half, wide)).to(values.dtype)


def _power_of_two(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """2^exponents, put together from its bits; the nearest normal number where it is none."""
    if dtype == torch.float64:
        return (exponents.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)
    return (exponents.clamp(-126, 127) + 127 << 23).to(torch.int32).view(torch.float32)
