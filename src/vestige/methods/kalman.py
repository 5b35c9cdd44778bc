"""Kalman: DP-SGD whose releases pass a steady-state Kalman filter, one gain per group.

With beta below 1 the filter's estimate is the memory in the query instead: see estimating.py.

The noise of a release is known; how far the sum moves per step is estimated from the releases.
See vestige.updates.kalman for the equations.

Paper: the denoising that FO-DP-SGD (arXiv 2605.09890) and SMA-DP-SGD (arXiv 2605.20450) name as
future work; this form is ours.
Guarantee: that of DP-SGD at sigma/beta: the filter sees releases only. Also as `denoiser=` after
any method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.methods.base import AT_SIGMA_OVER_BETA, Surroundings
from vestige.methods.estimating import EstimatingMethod
from vestige.plan import Schedule

if TYPE_CHECKING:
    from vestige.updates.filters import Filter


@dataclass(frozen=True)
class Kalman(EstimatingMethod):
    """Kalman-filtered DP-SGD. Proven: Poisson-subsampled Gaussian at sigma/beta."""

    name: ClassVar[str] = "kalman"
    paper: ClassVar[str] = "ours, after arXiv 2605.09890 and 2605.20450 (future work)"
    guarantee: ClassVar[str] = AT_SIGMA_OVER_BETA
    clipping: ClassVar[str] = "per_layer"
    summary: ClassVar[str] = "steady-state Kalman filter of the releases, a gain per layer"
    extra_memory: ClassVar[str] = "2 x parameters"

    beta: Schedule = 1.0

    def _make_filter(self, around: Surroundings) -> Filter:
        from vestige.updates.kalman import KalmanFilter

        return KalmanFilter(around.like, around.segments)
