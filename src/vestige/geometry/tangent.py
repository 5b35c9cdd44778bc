"""Tangent: how far and which way each example would turn a public reference direction.

    v_i = g_i / |g_i|,  c_i = <u, v_i>,  t_i = (v_i - c_i u) / |v_i - c_i u|,  a_i = angle(u, v_i)
    x_i = w_i min(a_i, R) t_i,   |x_i| <= R,   w_i = m_i / C (or 1)
    decoded:  Exp_u(Y) = cos|Y| u + sin|Y| Y / |Y|,   Y = X / lot in u's tangent space, |Y| <= R

A form of GeoDP (Duan et al. 2025, arXiv 2504.05618) without a chart: rotating all gradients and the
reference rotates the result. There is no free accuracy in it: in many dimensions nearly every angle
is about pi/2, so for R below that x_i = R t_i, which is normalised clipping in the tangent space,
and R says how far one step may turn, like the strength of a momentum.

Guarantee: |x_i| <= R for every gradient, so a release is a Gaussian mechanism at the multipliers of
its two segments (see base.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.geometry.base import Geometry

# Below this sine an example lies along the reference, forwards or backwards, as far as float64 can
# tell: it shows no way to turn.
_ALONG = 1e-12


class Tangent(Geometry):
    """Turns away from the last release's direction, in P coordinates, and the length.

    `radius`, R in (0, pi], bounds one example's turn in radians. `weighted` scales it by the
    example's share m_i / C, so that short gradients turn the direction less.
    """

    def __init__(
        self, like: Tensor, radius: float = 1.0, weighted: bool = True, seed: int = 0
    ) -> None:
        if not is_number(radius) or not 0 < radius <= math.pi:
            raise ConfigError(
                f"radius={radius!r} must be above 0 and at most pi: it is the angle in radians by "
                "which one example may turn the last direction."
            )
        self.radius, self.weighted = float(radius), bool(weighted)
        super().__init__(like, like.numel() + 1, seed)

    def _direction_bound(self) -> float:
        return self.radius

    def _directions(self, rows: Tensor, shares: Tensor) -> Tensor:
        norms = torch.linalg.vector_norm(rows, dim=1)
        rows = rows.div_(norms.where(norms > 0, 1.0)[:, None])
        cosines = rows @ self._reference
        turns = rows.addr_(cosines, self._reference, alpha=-1.0)
        # Measured, not sqrt(1 - cos^2): the bound must hold next to the poles too.
        sines = torch.linalg.vector_norm(turns, dim=1)
        factors = torch.atan2(sines, cosines).clamp_(max=self.radius) / sines
        factors = factors.where(sines > _ALONG, 0.0)
        if self.weighted:
            factors = factors * shares
        return torch.mv(turns.T, factors)

    def _direction(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        u = self._reference
        turn = parts - (parts @ u) * u  # the noise has a part along u, which means nothing
        norm = torch.linalg.vector_norm(turn)
        # No mean of turns is longer than R. Longer ones are noise, and would go round the sphere.
        angle = norm.clamp(max=self.radius)
        turned = torch.cos(angle) * u + turn * (torch.sin(angle) / norm.where(norm > 0, 1.0))
        turned /= torch.linalg.vector_norm(turned)
        return turned.clone(), turned

    def _remembered(self, unit: Tensor) -> Tensor:
        return unit

    def _fits(self, reference: Tensor) -> bool:
        return abs(float(torch.linalg.vector_norm(reference)) - 1) < 1e-6
