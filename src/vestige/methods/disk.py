"""DiSK: gradients from a look-ahead point, averaged by a simplified Kalman filter.

    d = theta_t - theta_(t-1),    c = (1 - gain) / (gain * ahead)
    u_i = c * gradient at theta_t + ahead * d  +  (1 - c) * gradient at theta_t,   clipped as one
    y_t = sum of clipped u_i, plus noise;   m <- (1 - gain) m + gain * y_t   (m = y_0 at step 0)

`ahead` None is (1 - gain) / gain: then c = 1, one pass suffices, and the ordinary loop works. Any
other `ahead` evaluates the batch twice, in `optimizer.step(closure)`.

Paper: Zhang et al., DiSK, ICLR 2025, arXiv 2410.03883 (kappa = gain, 0.7; gamma = ahead, 0.5).
Guarantee: that of DP-SGD at sigma: both gradients of an example are inside one clip, and the
look-ahead point is known before the lot is drawn.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vestige.methods.base import AT_SIGMA, Method, Surroundings
from vestige.methods.checks import check_positive, check_share

if TYPE_CHECKING:
    from vestige.gradients import Capture
    from vestige.release.door import Release
    from vestige.updates.ascent import Ascent
    from vestige.updates.filters import Filter
    from vestige.updates.passes import Passes


@dataclass(frozen=True)
class Disk(Method):
    """DiSK in one pass or two. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "disk"
    paper: ClassVar[str] = "Zhang et al. 2025, arXiv 2410.03883"
    guarantee: ClassVar[str] = AT_SIGMA
    summary: ClassVar[str] = "gradients ahead of the weights, averaged"
    extra_memory: ClassVar[str] = "3 x parameters"

    gain: float = 0.7
    ahead: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("gain", self.gain)
        if self.ahead is not None:
            check_positive("ahead", self.ahead)

    @property
    def _distance(self) -> float:
        return (1 - self.gain) / self.gain if self.ahead is None else self.ahead

    @property
    def weight(self) -> float:
        """c: the weight of the gradient at the look-ahead point."""
        return 1.0 if self.ahead is None else (1 - self.gain) / (self.gain * self.ahead)

    @property
    def needs_closure(self) -> bool:
        """Two points are two passes."""
        return self.weight != 1

    def passes(self, capture: Capture, look: Callable[[], Release], ascent: Any) -> Passes | None:
        """The gradient here and ahead, combined example by example."""
        from vestige.updates.passes import TwoPoints

        return TwoPoints(capture, ascent, self.weight) if self.needs_closure else None

    def filter(self, around: Surroundings) -> Filter:
        """The average."""
        from vestige.updates.filters import RunningMean

        return RunningMean(around.like, self.gain)

    def ascent(self, around: Surroundings) -> Ascent:
        """Ahead: against the way back."""
        from vestige.updates.ascent import Ascent

        return Ascent(
            around.slots, around.like, -self._distance, displacement=True, normalised=False
        )
