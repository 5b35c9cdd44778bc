"""DP-SAT: sharpness-aware training in one pass: climb along the last release, then take the step.

    e = radius * y_(t-1) / |y_(t-1)|;   y_t = sum of clipped gradients at theta + e, plus noise
    theta <- theta - lr * y_t / lot                             (from theta, not from theta + e)

The momentum variant climbs back along the last step of the weights, theta_(t-1) - theta_t.

Paper: Park et al., ICML 2023, arXiv 2306.05651, and its code (radius 0.03 there, too).
Guarantee: that of DP-SGD at sigma: e is a function of releases, known before the lot is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.methods.base import AT_SIGMA, Method, Surroundings
from vestige.methods.checks import check_non_negative

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from vestige.updates.ascent import Ascent


@dataclass(frozen=True)
class DPSAT(Method):
    """Sharpness-aware DP-SGD in one pass. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-sat"
    paper: ClassVar[str] = "Park et al. 2023, arXiv 2306.05651"
    guarantee: ClassVar[str] = AT_SIGMA
    summary: ClassVar[str] = "gradients at weights moved along the last release"
    extra_memory: ClassVar[str] = "2 x parameters"
    displacement: ClassVar[bool] = False

    radius: float = 0.03

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative("radius", self.radius)

    def optimizer_class(self) -> type[Optimizer]:
        """torch.optim.SGD."""
        import torch

        return torch.optim.SGD

    def ascent(self, around: Surroundings) -> Ascent:
        """What moves the weights."""
        from vestige.updates.ascent import Ascent

        return Ascent(around.slots, around.like, self.radius, self.displacement)


@dataclass(frozen=True)
class DPSATMomentum(DPSAT):
    """DP-SAT along the last displacement of the weights. Proven: subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-sat-momentum"
    summary: ClassVar[str] = "gradients at weights moved back along their last step"
    displacement: ClassVar[bool] = True
