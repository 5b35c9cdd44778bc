"""Norms and clipped sums of weight gradients in the precision of the tensor cores.

A record's weight gradient is G = sum_t g_t a_t^T over its positions t, from the inputs a (n, t, d)
and output gradients g (n, t, p) that autograd has. Clipping needs |G| for every record and
sum_i f_i G_i, and nothing else.

`square_norms` and `add_weighted` choose by device and shape. `reference` has both in torch, for any
device; `fused` has Triton kernels for CUDA that never store a G or a Gram matrix. `bounds` says how
far rounding can move either of them; docs/numerics.md derives it.

Guarantee: `square_norms` never understates the norm of what `add_weighted` adds, whatever finite
numbers a and g hold. An overstated norm only clips more. Each row's norm depends on that row alone,
and nothing is read back by the host.
"""

from __future__ import annotations

from torch import Tensor

from vestige.gradients.kernels import fused, reference
from vestige.gradients.kernels.bounds import prefers_gram
from vestige.gradients.kernels.reference import clip_factors

__all__ = ["add_weighted", "as_multiplied", "clip_factors", "square_norms"]


def as_multiplied(values: Tensor) -> Tensor:
    """`values` rounded once to what a product sees, so that norm and sum see the same numbers.

    On a GPU they are also laid out as the fused kernels like them, which may put zeros behind the
    last position or feature: call it once for norm and sum.
    """
    return fused.arranged(values) if fused.covers(values, values) else reference.rounded(values)


def square_norms(a: Tensor, g: Tensor) -> Tensor:
    """Certified |sum_t g[i, t] a[i, t]^T|^2 for every row i, (n,), in float64.

    a and g are counted as given: pass what the product will see (`as_multiplied`). A row that holds
    something that is not finite, or is too large for a sum in float32, has an infinite norm.
    """
    if fused.covers(a, g):
        return fused.square_norms(*fused.of_one_length(a, g))[0]
    if prefers_gram(a.shape[1], g.shape[2], a.shape[2], a.dtype):
        return reference.gram_norms(a, g)
    return reference.product_norms(a, g)


def add_weighted(a: Tensor, g: Tensor, factors: Tensor, total: Tensor) -> None:
    """Add sum_i factors[i] sum_t g[i, t] a[i, t]^T to `total` (p, d).

    A row whose factor is zero adds nothing, even if it is not finite.
    """
    if fused.covers(a, g):
        fused.add_weighted(*fused.of_one_length(a, g), factors, total)
    else:
        reference.add_weighted(a, g, factors, total)
