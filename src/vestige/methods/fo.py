"""FO-DP-SGD: the query mixes the clipped sum with a fractional memory of earlier releases.

    release_t = beta * sum_t + (1 - beta) * sum_j a_j release_(t-j) + N(0, sigma^2 C^2 I)

with the weights a_j of vestige.memory.fractional, taken over the whole release whatever the
clipping. Step 0 releases beta * sum_0; window 1 releases beta * sum_t; beta 1 is DP-SGD.

Paper: FO-DP-SGD, arXiv 2605.09890, Algorithm 1 (lambda = tempering, tau = inconsistency,
gamma = ema, kappa = min_scale, zeta = confidence). The paper states beta, alpha and window; the
other defaults are ours.
Guarantee: given the earlier releases the memory is a constant, so a release is a Poisson-subsampled
Gaussian with multiplier sigma/beta; epsilon is their composition. It is the same mechanism as
DP-SGD at sigma/beta with a filter after it (docs/methods/fo.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.methods.base import AT_SIGMA_OVER_BETA
from vestige.methods.checks import check_non_negative, check_positive, check_share
from vestige.methods.remembering import RememberingMethod
from vestige.plan import Schedule

if TYPE_CHECKING:
    from vestige.memory.base import Memory

FO_PAPER = "FO-DP-SGD 2026, arXiv 2605.09890"
IN_QUERY = AT_SIGMA_OVER_BETA


@dataclass(frozen=True)
class FO(RememberingMethod):
    """FO-DP-SGD. Proven: Poisson-subsampled Gaussian at multiplier sigma/beta."""

    name: ClassVar[str] = "fo"
    paper: ClassVar[str] = FO_PAPER
    guarantee: ClassVar[str] = IN_QUERY
    summary: ClassVar[str] = "fractional memory of releases in the query"
    extra_memory: ClassVar[str] = "(window + 1) x parameters"

    beta: Schedule = 0.9
    alpha: float = 0.8
    window: int = 8
    tempering: float = 0.0
    inconsistency: float = 0.1
    ema: float = 0.3
    min_scale: float = 1e-6
    confidence: float = 1.0
    eps: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("alpha", self.alpha)
        check_non_negative("tempering", self.tempering)
        check_non_negative("inconsistency", self.inconsistency)
        check_share("ema", self.ema)
        for name in ("min_scale", "confidence", "eps"):
            check_positive(name, getattr(self, name))

    def _rule(self, steps_per_epoch: int) -> Memory:
        from vestige.memory.fractional import FractionalMemory

        return FractionalMemory(
            window=self.window,
            alpha=self.alpha,
            tempering=self.tempering,
            inconsistency=self.inconsistency,
            ema=self.ema,
            min_scale=self.min_scale,
            confidence=self.confidence,
            eps=self.eps,
        )
