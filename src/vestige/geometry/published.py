"""GeoDP exactly as published: noise on the radius and on the angles of the mean gradient.

    r* = r + (C / B) n_0,   theta* = theta + (sqrt(d + 2) beta pi / B) n,   n ~ N(0, sigma^2)

Duan, Hu, Ye, Sun 2025, arXiv 2504.05618 (beta is `bounding`).

Guarantee: NONE, this is not private. The noise assumes that one example moves the mean's angles by
at most sqrt(d + 2) beta pi / B in l2 norm. One example can move an angle by pi at any B and beta:

(a) d = 2, B - 1 clipped gradients with the sum -(C/2) e_1 and one more of C e_1: with it theta is
    0, without it pi. At B = 64, beta = 0.1, sigma = 1 the angles theta* are 320 standard deviations
    apart, and (r*, theta*) has delta = 1 at epsilon = 10. (The vector made of them hides this case,
    because r is then so small that r* has a random sign. Not the next.)
(b) mean (C/8, +-C/128, 0) at B = 64: one example turns the last angle by pi, r is 8 and the first
    angle 5.7 standard deviations from zero, so the sign of the vector's second coordinate tells
    which batch it was: delta > 0.9998 at epsilon = 10.

Nothing confines angles to the share beta of their range either, so the paper's delta' for leaving
it can be 1, and two releases at sigma each are one at sigma / sqrt(2). For study only: report
epsilon as infinity.
"""

from __future__ import annotations

import math

from torch import Tensor

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.geometry.hyperspherical import to_cartesian, to_hyperspherical


def angle_scale(dimension: int, batch: int, bounding: float) -> float:
    """What the paper takes for the sensitivity of the mean's angles: sqrt(d + 2) beta pi / B."""
    return math.sqrt(dimension + 2) * bounding * math.pi / batch


def perturbed(mean: Tensor, noise: Tensor, clip: float, batch: int, bounding: float) -> Tensor:
    """The mean with `noise` on its radius (the first number) and its angles. Not private.

    `mean` is the flat mean of clipped gradients, without noise (private!); `noise` as many numbers
    from N(0, sigma^2). The radius may come out negative, and angles out of range, as published.
    """
    if mean.ndim != 1 or noise.shape != mean.shape:
        raise ConfigError(
            f"a mean of shape {tuple(mean.shape)} and noise of shape {tuple(noise.shape)} do not "
            "fit: give two flat tensors of the same length."
        )
    for name, value in (("clip", clip), ("batch", batch), ("bounding", bounding)):
        if not is_number(value) or value <= 0:
            raise ConfigError(f"{name}={value!r} must be a positive finite number.")
    if bounding > 1:
        raise ConfigError(f"bounding={bounding!r} must be at most 1: it is a share of a range.")
    noise = noise.double()
    radius, angles = to_hyperspherical(mean[None])
    radius = radius + clip / batch * noise[:1]
    angles = angles + angle_scale(mean.numel(), batch, bounding) * noise[1:]
    return to_cartesian(radius, angles)[0].to(mean.dtype)
