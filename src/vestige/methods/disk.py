"""DiSK in one pass: gradients at a look-ahead point, averaged by a simplified Kalman filter.

    d = theta_t - theta_(t-1),    y_t = sum of clipped gradients at theta_t + ahead * d, plus noise
    m <- (1 - gain) m + gain * y_t     (m = y_0 at step 0),    ahead = (1 - gain) / gain

This is the case of the paper where its two gradients fall together (c = 1), so the lot is looked at
once. The two-point form is not part of this version.

Paper: Zhang et al., DiSK, ICLR 2025, arXiv 2410.03883 (kappa = gain, 0.7 there; gamma = ahead).
Guarantee: that of DP-SGD at sigma: the look-ahead point is known before the lot is drawn.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.methods.base import AT_SIGMA, Method, Surroundings
from vestige.methods.checks import check_share

if TYPE_CHECKING:
    from vestige.updates.ascent import Ascent
    from vestige.updates.filters import Filter


@dataclass(frozen=True)
class Disk(Method):
    """One-pass DiSK. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "disk"
    paper: ClassVar[str] = "Zhang et al. 2025, arXiv 2410.03883 (one-pass case)"
    guarantee: ClassVar[str] = AT_SIGMA
    summary: ClassVar[str] = "gradients ahead of the weights, averaged"
    extra_memory: ClassVar[str] = "3 x parameters"

    gain: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("gain", self.gain)

    def filter(self, around: Surroundings) -> Filter:
        """The average."""
        from vestige.updates.filters import RunningMean

        return RunningMean(around.like, self.gain)

    def ascent(self, around: Surroundings) -> Ascent:
        """Ahead: against the way back."""
        from vestige.updates.ascent import Ascent

        ahead = (1 - self.gain) / self.gain
        return Ascent(around.slots, around.like, -ahead, displacement=True, normalised=False)
