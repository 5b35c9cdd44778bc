"""Squared norms from Gram matrices: |G|^2 = sum_ts (a_t . a_s)(g_t . g_s), which forms no product.

In float64, so that cancelling terms do not cost the norm. docs/numerics.md derives what is added
for the sum that the norm is to bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vestige.gradients.kernels.bounds import accumulation

COARSE = 1e-4  # sums whose rounding is above this round their factors, too (TF32, bf16)


def gram_norms(
    a: Tensor, g: Tensor, dtype: torch.dtype, rounding: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Squared norms of sum_t g[i, t] a[i, t]^T from (n, t, ...) float64 factors, by two Gram
    matrices, and their slack: what the sum itself, in `dtype`, may be off by is added to the norm.

    `rounding` is that of the factors, where the sum rounds them first (TF32): it moves the sum by
    at most as much of the terms' norms.
    """
    unit = rounding_unit(torch.float64, sum(a.shape[1:]) + g.shape[2])
    off = accumulation(a.shape[1], dtype) + (rounding if rounding > COARSE else 0.0)
    gram_a = torch.bmm(a, a.transpose(1, 2))
    gram_g = torch.bmm(g, g.transpose(1, 2))
    squares = [limited(gram.diagonal(dim1=1, dim2=2), dtype) for gram in (gram_a, gram_g)]
    terms = squares[0].mul(squares[1]).sqrt_().sum(1)
    norms = gram_a.mul_(gram_g).sum((1, 2)).clamp_(min=0).add_(terms.square().mul_(unit)).sqrt_()
    slack = terms.mul_(off)
    return norms.add_(slack).square_(), slack


def rounding_unit(dtype: torch.dtype, width: int) -> float:
    """Rounding error relative to (sum of the terms' norms)^2, for dot products of `width` terms."""
    eps = torch.finfo(dtype).eps
    return eps * width if dtype == torch.float64 else eps


def limited(squares: Tensor, dtype: torch.dtype) -> Tensor:
    """Squared norms of factors, infinite where `dtype` could not hold them: such an example drops
    out, because its clipped product of a huge and a vanishing factor would not be exact."""
    most = torch.finfo(dtype).max
    if squares.numel() == 0 or (squares.device.type == "cpu" and float(squares.max()) <= most):
        return squares
    return squares.masked_fill(squares > most, torch.inf)
