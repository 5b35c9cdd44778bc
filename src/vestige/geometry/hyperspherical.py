"""Vectors to a radius and angles, and back, in time linear in the dimension d.

    r = |g|,   theta_z = atan2(|g_(z+1:d)|, g_z) in [0, pi] for z <= d-2,
    theta_(d-1) = atan2(g_d, g_(d-1)) in (-pi, pi]
    g_z = r cos(theta_z) prod_(k<z) sin(theta_k),   g_d = r prod_k sin(theta_k)

Everything is float64 inside, whatever comes in: a round trip at d = 100,000 is exact to 1e-12 of
the radius. Coordinates below 1e-154 of a row's largest count as zero. One coordinate alone has no
angle (its direction is a sign), so d >= 2. Paper: Duan et al. 2025, arXiv 2504.05618, equation 6.
"""

from __future__ import annotations

import torch
from torch import Tensor

from vestige.errors import ConfigError


def to_hyperspherical(rows: Tensor, undefined: Tensor | float = 0.0) -> tuple[Tensor, Tensor]:
    """Radius (n,) and angles (n, d-1) of the rows (n, d).

    Where a coordinate and all after it are zero its angle is `undefined`: a number or one for each
    angle; what is there does not matter on the way back. A radius past float64's range is inf.
    """
    if rows.ndim != 2 or not rows.is_floating_point():
        raise ConfigError(
            f"rows of shape {tuple(rows.shape)} and {rows.dtype} have no angles: pass one vector "
            "in each row of a floating point matrix."
        )
    if rows.shape[1] < 2:
        raise ConfigError(
            f"vectors of length {rows.shape[1]} have no angles: a direction needs at least two "
            "coordinates."
        )
    rows = rows.double()
    largest = rows.abs().amax(dim=1, keepdim=True)
    # Squares of numbers up to 1 cannot overflow. Adding zero turns -0.0, whose angle would be pi,
    # into 0.0.
    rows = rows.div(largest.where(largest > 0, 1.0)).add_(0.0)
    tails = rows.square().flip(1).cumsum_(1).flip(1).sqrt_()  # |g_z:d|, g_z included
    angles = torch.atan2(tails[:, 1:], rows[:, :-1])
    angles[:, -1] = torch.atan2(rows[:, -1], rows[:, -2])
    known = tails[:, :-1] > 0
    if isinstance(undefined, Tensor):
        undefined = undefined.to(angles)
    return largest[:, 0] * tails[:, 0], torch.where(known, angles, undefined)


def to_cartesian(radius: Tensor, angles: Tensor) -> Tensor:
    """The rows (n, d) with these radii (n,) and angles (n, d-1), in float64.

    Angles may be any finite numbers: outside their range they flip the signs of what comes after.
    """
    if angles.ndim != 2 or radius.shape != angles.shape[:1] or angles.shape[1] < 1:
        raise ConfigError(
            f"radii of shape {tuple(radius.shape)} and angles of shape {tuple(angles.shape)} do "
            "not belong together: give (n,) and (n, d-1), d at least 2."
        )
    angles = angles.double()
    rows = angles.new_ones(angles.shape[0], angles.shape[1] + 1)
    torch.cos(angles, out=rows[:, :-1])
    # No logarithms are needed against underflow: no sine is above 1, so a product that reaches
    # zero belongs to coordinates below 1e-308 of the radius, and a plain product keeps the signs.
    rows[:, 1:] *= torch.sin(angles).cumprod_(1)
    return rows.mul_(radius.double()[:, None])
