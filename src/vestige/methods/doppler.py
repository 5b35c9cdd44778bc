"""DOPPLER: DP-SGD with a low-pass filter between the release and the optimizer.

    m_t = (1 - smoothing) m_(t-1) + smoothing * release_t      (order 1), divided by its gain c_t

Order 2 is the slow low-pass of the authors' code; `smoothing` does not apply to it. A constant
gradient passes unchanged from step 0 on; smoothing 1 is DP-SGD. With beta below 1 the filter's
output is the memory in the query instead: see estimating.py.

Paper: Zhang et al., DOPPLER, NeurIPS 2024, arXiv 2408.13460; smoothing 0.3 is ours.
Guarantee: that of DP-SGD at sigma/beta: the filter sees releases only. Also as `denoiser=` after
any method.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.errors import ConfigError
from vestige.methods.base import AT_SIGMA_OVER_BETA, Surroundings
from vestige.methods.checks import check_share
from vestige.methods.estimating import EstimatingMethod
from vestige.plan import Schedule

if TYPE_CHECKING:
    from vestige.updates.filters import Filter


@dataclass(frozen=True)
class Doppler(EstimatingMethod):
    """Low-pass filtered DP-SGD. Proven: Poisson-subsampled Gaussian at sigma/beta."""

    name: ClassVar[str] = "doppler"
    paper: ClassVar[str] = "Zhang et al. 2024, arXiv 2408.13460"
    guarantee: ClassVar[str] = AT_SIGMA_OVER_BETA
    summary: ClassVar[str] = "low-pass filter of the releases"
    extra_memory: ClassVar[str] = "1 (order 1) or 4 (order 2) x parameters"

    order: int = 1
    smoothing: float = 0.3
    beta: Schedule = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("smoothing", self.smoothing)
        if type(self.order) is not int or self.order not in (1, 2):
            raise ConfigError(f"order={self.order!r} must be 1 or 2.")

    def _make_filter(self, around: Surroundings) -> Filter:
        from vestige.updates.doppler import SECOND_ORDER, DopplerFilter

        if self.order == 2:
            return DopplerFilter(around.like, *SECOND_ORDER)
        return DopplerFilter(around.like, (self.smoothing - 1,), (self.smoothing,))
