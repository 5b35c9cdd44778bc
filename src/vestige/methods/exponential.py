"""Exponential memory in the query: weights decay^(j-1), normalised (the FO paper's equation 26).

Paper: FO-DP-SGD, arXiv 2605.09890, appendix A.9 (ablation); its decay is not stated, 0.7 is ours.
Guarantee: as for FO, one Poisson-subsampled Gaussian at sigma/beta per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.methods.fo import FO_PAPER, IN_QUERY
from vestige.methods.remembering import RememberingMethod
from vestige.plan import Schedule

if TYPE_CHECKING:
    from vestige.memory.base import Memory


@dataclass(frozen=True)
class Exponential(RememberingMethod):
    """Geometric memory in the query. Proven: subsampled Gaussian at sigma/beta."""

    name: ClassVar[str] = "exponential"
    paper: ClassVar[str] = f"{FO_PAPER}, equation 26"
    guarantee: ClassVar[str] = IN_QUERY
    summary: ClassVar[str] = "geometric memory of releases in the query"
    extra_memory: ClassVar[str] = "(window + 1) x parameters"

    beta: Schedule = 0.9
    window: int = 8
    decay: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.decay) or not 0 < self.decay < 1:
            raise ConfigError(f"decay={self.decay!r} must be strictly between 0 and 1.")

    def _rule(self, steps_per_epoch: int) -> Memory:
        from vestige.memory.exponential import ExponentialMemory

        return ExponentialMemory(self.window, self.decay)
