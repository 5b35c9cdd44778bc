"""How far rounding can move a norm or a sum of products, and the norm that allows for it.

Every bound is relative to S = sum_t |a_t| |g_t|, a record's sum of the norms of its terms: rounding
moves a product g a^T by no more than a small share of S, and |G| <= S always. docs/numerics.md
derives each line.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from vestige.errors import ConfigError

# What one term adds to the relative error of a sum of products in float32. Rounding to nearest has
# half of it; tensor cores truncate, after they have aligned the terms of an instruction.
FLOAT32_UNIT = 2.0**-23
DEEPEST = 2**19  # terms; beyond it the errors of second order would no longer vanish

# The factor of each record, multiplied into g before the product, is rounded with g. Relative to S:
FACTOR_ON_PRODUCT = 0.0  # not at all: it multiplies the finished product in float32
FACTOR_SPLIT = 2.0**-15  # f g as the sum of two bf16 numbers
FACTOR_ON_BF16 = 2.0**-8 + 2.0**-15  # f g rounded to bf16: without positions only
FACTOR_ON_TF32 = 2.0**-10 + 2.0**-15

# Rows with a larger S are dropped: their product may not fit in float32. A normal product cannot
# lose more than SMALLEST to underflow, even where hardware flushes denormal numbers.
LARGEST_TERMS = 2.0**100
LARGEST_INPUTS = 2.0**60  # where f multiplies g: a denormal f g would be rounded by too much
SMALLEST = 2.0**-126
OVERSTATED = 0.01  # what a Gram matrix may overstate a norm by, where positions do not align


class RowTerms(NamedTuple):
    """Sums over the positions of each row, (n,), in float64 and rounded up."""

    products: Tensor  # S = sum_t |a_t| |g_t|
    inputs: Tensor  # sum_t |a_t|
    gradients: Tensor  # sum_t |g_t|


class Shape(NamedTuple):
    """Positions, and the height and width of the weight."""

    t: int
    p: int
    d: int

    @classmethod
    def of(cls, a: Tensor, g: Tensor) -> Shape:
        """That of the product of a (n, t, d) and g (n, t, p)."""
        return cls(a.shape[1], g.shape[2], a.shape[2])


def unit(dtype: torch.dtype) -> float:
    """The error of one term in a sum of products whose inputs have `dtype`."""
    return 2.0**-52 if dtype == torch.float64 else FLOAT32_UNIT


def accumulation(depth: int, dtype: torch.dtype) -> float:
    """c_k: how far a sum of `depth` products is off, relative to the sum of their magnitudes."""
    if depth > DEEPEST:
        raise ConfigError(
            f"a sum of {depth} products is too long to bound its rounding (at most {DEEPEST}): "
            "use shorter sequences or a narrower layer."
        )
    return depth * unit(dtype)


def gram_slack(shape: Shape, dtype: torch.dtype) -> float:
    """gamma: how far |G|^2 from two Gram matrices is off, relative to S^2."""
    c_d, c_p = accumulation(shape.d, dtype), accumulation(shape.p, dtype)
    # Two more for the product of two entries, and the float64 sum over all of them.
    return c_d + c_p + c_d * c_p + accumulation(2, dtype) + shape.t**2 * 2.0**-52


def prefers_gram(t: int, p: int, d: int, dtype: torch.dtype) -> bool:
    """Whether Gram matrices are smaller than the product, and tight enough.

    S^2 / |G|^2 is about t where positions do not align, so the norm is overstated by about
    gamma t / 2. A function of the shape alone: it is the same for every record.
    """
    smaller = t * (p + d) <= p * d
    return smaller and gram_slack(Shape(t, p, d), dtype) * t / 2 <= OVERSTATED


def underflow(terms: RowTerms, shape: Shape, dtype: torch.dtype) -> Tensor:
    """How far lost denormal numbers can move a row's product, (n,)."""
    t, p, d = shape
    tiny = torch.finfo(dtype).tiny if dtype == torch.float64 else SMALLEST
    factors = math.sqrt(d) * terms.gradients + math.sqrt(p) * terms.inputs
    return (factors + (t + 2) * math.sqrt(p * d)) * tiny


def certified(
    norms: Tensor,
    terms: RowTerms,
    shape: Shape,
    dtype: torch.dtype,
    factor_rounding: float = FACTOR_ON_PRODUCT,
) -> Tensor:
    """Squared norms that are not below that of the sum as it is added, (n,), in float64.

    `norms` are not below that of G: a form of |G| with its slack, or what is not a number. The sum
    rounds in its turn, by the depth of its products and by `factor_rounding`.
    """
    sums = terms.products
    # |G| <= S is a second certificate, and the only one where a form over- or underflowed.
    bound = torch.where(norms < sums, norms, sums)
    rounding = accumulation(shape.t, dtype) + factor_rounding
    bound = bound + rounding * sums + underflow(terms, shape, dtype)
    # No product at all, whatever the factors: exactly nothing is added.
    bound = torch.where(sums == 0, 0.0, bound)
    most = LARGEST_TERMS if dtype != torch.float64 else 2.0**500
    fits = sums <= most
    if factor_rounding != FACTOR_ON_PRODUCT:
        fits &= terms.inputs <= LARGEST_INPUTS
    return torch.where(fits, bound, torch.inf).square()
