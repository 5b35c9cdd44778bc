"""GeoDP: noise on the direction and on the length of the gradient instead of on its coordinates.

`geodp` is the published mechanism, which is NOT private. `geodp-box` and `geodp-tangent` are
rigorous: every example's own direction, relative to the last released one, is bounded before the
sum. See vestige.geometry for the equations.

Paper: Duan et al., arXiv 2504.05618. The rigorous variants are ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from torch import Tensor

from vestige.checks import is_number
from vestige.geometry import Box, Geometry, Tangent
from vestige.geometry.published import perturbed
from vestige.methods.catalogue import METHODS
from vestige.methods.method import (
    OWN_FILTER,
    UNKNOWN_NOISE,
    WHOLE_GRADIENT,
    DrawContext,
    Feature,
    Method,
)
from vestige.methods.settings import Share, must_be
from vestige.release.door import Distortion

REFERENCE_SEED = 0  # of the first reference direction: public, the same in every run


class _Directions(Method):
    """What the three share: what reaches the optimizer is no sum plus known noise."""

    def excludes(self) -> Mapping[Feature, str]:
        """Groups, and whatever needs to know the noise of a gradient."""
        return {**WHOLE_GRADIENT, **OWN_FILTER, **UNKNOWN_NOISE}


@dataclass(frozen=True)
class GeoDP(_Directions):
    """GeoDP as published. NOT private: one example can turn an angle by pi.

    The mean of the clipped gradients in hyperspherical coordinates, with noise
    sqrt(d + 2) * bounding * pi / B on every angle. Its sensitivity claim is false, whatever B.
    """

    info = METHODS["geodp"]

    bounding: Share = 0.1

    def noise(self, context: DrawContext) -> Distortion:
        """The published mechanism, on sums."""
        lot = context.plan.batch_size

        def distorted(total: Tensor, noise: Tensor, bounds: tuple[float, ...]) -> Tensor:
            return perturbed(total / lot, noise, bounds[0], lot, self.bounding).mul(lot)

        return distorted


@dataclass(frozen=True)
class GeoDPBox(_Directions):
    """Bounded angles of every example around the last direction."""

    info = METHODS["geodp-box"]

    bounding: Share = 0.05

    def geometry(self, like: Tensor) -> Geometry:
        """Angles in a box."""
        return Box(like, self.bounding, seed=REFERENCE_SEED)


@dataclass(frozen=True)
class GeoDPTangent(_Directions):
    """Bounded turns of every example away from the last direction."""

    info = METHODS["geodp-tangent"]

    radius: Annotated[
        float,
        must_be(
            "above 0 and at most pi: the largest turn of one example",
            lambda v: is_number(v) and 0 < v <= math.pi,
        ),
    ] = 1.0

    def geometry(self, like: Tensor) -> Geometry:
        """The tangent space at the last direction."""
        return Tangent(like, self.radius, seed=REFERENCE_SEED)
