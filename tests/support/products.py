"""Inputs and output gradients that make norms of products hard: for the kernels' tests."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.gradients.kernels.reference import round_to_tf32

PRECISIONS = ("bf16", "tf32", "fp32")


@dataclass(frozen=True)
class Hard:
    """A recipe of factors a (n, t, d) and g (n, t, p), one kind of difficulty per field."""

    n: int = 4
    t: int = 6
    p: int = 5
    d: int = 7
    precision: str = "bf16"
    seed: int = 0
    cancel: float | None = None  # the second half of the positions undoes the first, up to this
    aligned: bool = False  # all positions are one
    exponents: tuple[int, int] = (0, 0)  # of a and g, per row, turned around in every other row
    spread: int = 0  # of exponents among the positions, opposite in a and g
    zeros: bool = False  # a_t = 0 where g_t is huge, and the other way round

    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors, rounded once to the precision."""
        generator = torch.Generator().manual_seed(self.seed)
        a = torch.randn(self.n, self.t, self.d, generator=generator, dtype=torch.float64)
        g = torch.randn(self.n, self.t, self.p, generator=generator, dtype=torch.float64)
        if self.aligned:
            a, g = a[:, :1].expand_as(a).clone(), g[:, :1].expand_as(g).clone()
        half = self.t // 2
        shift = torch.randint(
            -self.spread, self.spread + 1, (self.n, self.t, 1), generator=generator
        )
        if self.cancel is not None:
            a[:, half : 2 * half] = a[:, :half]
            noise = torch.randn(self.n, half, self.p, generator=generator, dtype=torch.float64)
            g[:, half : 2 * half] = -g[:, :half] * (1 + self.cancel * noise)
            shift[:, half : 2 * half] = shift[:, :half]
        turned = torch.tensor([1 - 2 * (i % 2) for i in range(self.n)]).view(-1, 1, 1)
        a = torch.ldexp(a, self.exponents[0] * turned + shift)
        g = torch.ldexp(g, self.exponents[1] * turned - shift)
        if self.zeros:
            a[:, 0], g[:, 0] = 0, 2.0**120
            g[:, -1], a[:, -1] = 0, 2.0**120
        return rounded(a, self.precision), rounded(g, self.precision)


def rounded(values: Tensor, precision: str) -> Tensor:
    """float64 numbers as the products of `precision` see them; beyond its range, the largest."""
    most = 2.0**127
    values = values.clamp(-most, most)
    if precision == "bf16":
        return values.bfloat16()
    return round_to_tf32(values.float()) if precision == "tf32" else values.float()


def exact_products(a: Tensor, g: Tensor) -> Tensor:
    """Each record's sum_t g_t a_t^T, (n, p, d), contracted in float64."""
    return torch.bmm(g.double().transpose(1, 2), a.double())


def exact_norms(a: Tensor, g: Tensor) -> Tensor:
    """Its norm, (n,)."""
    return exact_products(a, g).flatten(1).norm(dim=1)
