"""GeoDP: noise on the direction and on the length of the gradient instead of on its coordinates.

`geodp` is the published mechanism: the mean of the clipped gradients in hyperspherical coordinates,
with noise sqrt(d + 2) * bounding * pi / B on every angle. Its sensitivity claim is false (one
example can turn an angle by pi, whatever B), so it is NOT private and epsilon is infinite.

`geodp-box` and `geodp-tangent` are rigorous: every example's own direction, relative to the last
released one, is bounded before the sum. See vestige.geometry for the equations.

Paper: Duan et al., arXiv 2504.05618. The rigorous variants are ours.
Guarantee: as published, none. Box and tangent: one subsampled Gaussian at sigma (sqrt(2) sigma on
the direction and on the length each).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.methods.base import AT_SIGMA, Method
from vestige.methods.checks import check_share

if TYPE_CHECKING:
    from torch import Tensor

    from vestige.geometry import Geometry
    from vestige.plan import PrivacyPlan
    from vestige.release.door import Distortion

REFERENCE_SEED = 0  # of the first reference direction: public, the same in every run


@dataclass(frozen=True)
class GeoDP(Method):
    """GeoDP as published. NOT private: one example can turn an angle by pi."""

    name: ClassVar[str] = "geodp"
    paper: ClassVar[str] = "Duan et al. 2025, arXiv 2504.05618"
    guarantee: ClassVar[str] = "not private as published: an angle's sensitivity is pi, not pi/B"
    summary: ClassVar[str] = "noise on hyperspherical angles, for study"
    private: ClassVar[bool] = False
    flat_only: ClassVar[bool] = True
    own_gradient: ClassVar[bool] = True

    bounding: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("bounding", self.bounding)

    def distortion(self, like: Tensor, plan: PrivacyPlan) -> Distortion:
        """The published mechanism, on sums."""
        from vestige.geometry.published import perturbed

        lot = plan.batch_size

        def distorted(total: Tensor, noise: Tensor, bounds: tuple[float, ...]) -> Tensor:
            return perturbed(total / lot, noise, bounds[0], lot, self.bounding).mul(lot)

        return distorted


class _Rigorous(Method):
    """What the two rigorous variants share."""

    paper: ClassVar[str] = "after Duan et al. 2025, arXiv 2504.05618; this form is ours"
    guarantee: ClassVar[str] = AT_SIGMA
    extra_memory: ClassVar[str] = "rows x parameters"
    flat_only: ClassVar[bool] = True
    own_gradient: ClassVar[bool] = True


@dataclass(frozen=True)
class GeoDPBox(_Rigorous):
    """Bounded angles of every example. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "geodp-box"
    summary: ClassVar[str] = "sums of examples' clipped angles around the last direction"
    default_lr: ClassVar[float] = 2.0

    bounding: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("bounding", self.bounding)

    def geometry(self, like: Tensor) -> Geometry:
        """Angles in a box."""
        from vestige.geometry import Box

        return Box(like, self.bounding, seed=REFERENCE_SEED)


@dataclass(frozen=True)
class GeoDPTangent(_Rigorous):
    """Bounded tangents of every example. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "geodp-tangent"
    summary: ClassVar[str] = "sums of examples' turns away from the last direction"

    radius: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.radius) or not 0 < self.radius <= math.pi:
            raise ConfigError(
                f"radius={self.radius!r} must be above 0 and at most pi: the largest turn of one "
                "example."
            )

    def geometry(self, like: Tensor) -> Geometry:
        """The tangent space at the last direction."""
        from vestige.geometry import Tangent

        return Tangent(like, self.radius, seed=REFERENCE_SEED)
