"""Box: every example's angles, each clipped to an interval around a public reference's.

    e_iz = wrap(theta_iz - phi_z), |e_iz| <= beta pi / 2 for z <= d-2, <= beta pi for the last
    bound on one example's e_i:  (beta pi / 2) sqrt(d + 2),   decoded:  phi + E / lot

It keeps GeoDP's chart and constants (Duan et al. 2025, arXiv 2504.05618) and makes its sensitivity
true: under replacement it is the published sqrt(d + 2) beta pi, for a sum. The mean of angles is
not the angle of the mean, the chart's last axes turn with small changes of a gradient, and d noisy
angles move a direction by about sqrt(d) times one's noise: `Tangent` has none of these problems.

Guarantee: each example contributes one bounded vector, wherever the chart is singular, so a
release is a Gaussian mechanism at the multipliers of its two segments (see base.py).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.geometry.base import Geometry
from vestige.geometry.hyperspherical import to_cartesian, to_hyperspherical


class Box(Geometry):
    """Angles clipped to a box around the last release's: P - 1 of them, and the length.

    `beta`, in (0, 1], is the width of the box as a share of the angles' range.
    """

    def __init__(self, like: Tensor, beta: float = 0.1, seed: int = 0) -> None:
        if not is_number(beta) or not 0 < beta <= 1:
            raise ConfigError(
                f"beta={beta!r} must be above 0 and at most 1: it is the share of their range by "
                "which an example's angles may differ from the last direction's."
            )
        self.beta = float(beta)
        super().__init__(like, like.numel(), seed)

    def _direction_bound(self) -> float:
        return self.beta * math.pi / 2 * math.sqrt(self.length + 2)

    def _directions(self, rows: Tensor, shares: Tensor) -> Tensor:
        # An angle that a gradient does not have (nothing but zeros follow) asks for no change.
        deviations = to_hyperspherical(rows, undefined=self._reference)[1] - self._reference
        deviations[:, -1] = _wrapped(deviations[:, -1])
        limit = self.beta * math.pi / 2
        deviations[:, :-1].clamp_(-limit, limit)
        deviations[:, -1].clamp_(-2 * limit, 2 * limit)
        return deviations.sum(dim=0)

    def _direction(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        angles = self._reference + parts
        # Folded back into [0, pi] at its ends: cos stays, and sin stays positive. Left outside, an
        # angle would flip the sign of every later coordinate; cut off, it would erase them.
        angles[:-1] = _wrapped(angles[:-1]).abs_()
        angles[-1] = _wrapped(angles[-1])
        # The angles themselves are kept: those of the vector are lost where sines underflow.
        return to_cartesian(angles.new_ones(1), angles[None])[0], angles

    def _remembered(self, unit: Tensor) -> Tensor:
        return to_hyperspherical(unit[None])[1][0]


def _wrapped(angles: Tensor) -> Tensor:
    """The same directions in [-pi, pi]."""
    return torch.remainder(angles + math.pi, 2 * math.pi) - math.pi
