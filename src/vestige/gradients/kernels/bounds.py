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

# Rows with a larger S are dropped: their product may not fit in float32. A normal product cannot
# lose more than SMALLEST to underflow, even where hardware flushes denormal numbers.
LARGEST_TERMS = 2.0**100
SMALLEST = 2.0**-126


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


def of_looks(same: Tensor, lengths: Tensor, dtype: torch.dtype) -> Tensor:
    """How far the sum of a looked-up table's gradient can be off, (n,).

    `same` (n, t, t) is 1 where two positions look at one row, `lengths` (n, t) are the norms of
    what they bring: a row of k looks is off by at most c_k times the sum of their norms.
    """
    sums = torch.bmm(same, lengths.unsqueeze(2)).squeeze(2)
    squares = same.sum(2).square_().mul_(lengths).mul_(sums).sum(1)
    return squares.sqrt_().mul_(unit(dtype))


def underflow(terms: RowTerms, shape: Shape) -> Tensor:
    """How far lost denormal numbers can move a row's product, (n,)."""
    t, p, d = shape
    factors = math.sqrt(d) * terms.gradients + math.sqrt(p) * terms.inputs
    return (factors + (2 * t + 2) * math.sqrt(p * d)) * SMALLEST


def certified(norms: Tensor, terms: RowTerms, shape: Shape, dtype: torch.dtype) -> Tensor:
    """Squared norms that are not below that of the sum as it is added, (n,), in float64.

    `norms` are not below that of G: |G| as computed with its slack, or what is not a number. The
    sum rounds in its turn, by the depth of its products; each factor multiplies a finished product
    in float32.
    """
    sums = terms.products
    # |G| <= S is a second certificate, and the only one where the product over- or underflowed.
    bound = torch.where(norms < sums, norms, sums)
    bound = bound + accumulation(shape.t, dtype) * sums + underflow(terms, shape)
    # No product at all, whatever the factors: exactly nothing is added.
    bound = torch.where(sums == 0, 0.0, bound)
    return torch.where(sums <= LARGEST_TERMS, bound, torch.inf).square()
