"""Uniform memory in the query: FO-DP-SGD with the mean of the last releases (its equation 24).

Paper: FO-DP-SGD, arXiv 2605.09890, appendix A.9 (ablation).
Guarantee: as for FO, one Poisson-subsampled Gaussian at sigma/beta per step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.methods.fo import FO_PAPER, IN_QUERY
from vestige.methods.remembering import RememberingMethod
from vestige.plan import Schedule

if TYPE_CHECKING:
    from vestige.memory.base import Memory


@dataclass(frozen=True)
class Uniform(RememberingMethod):
    """The mean of earlier releases in the query. Proven: subsampled Gaussian at sigma/beta."""

    name: ClassVar[str] = "uniform"
    paper: ClassVar[str] = f"{FO_PAPER}, equation 24"
    guarantee: ClassVar[str] = IN_QUERY
    summary: ClassVar[str] = "mean of the last releases in the query"
    extra_memory: ClassVar[str] = "(window + 1) x parameters"

    beta: Schedule = 0.9
    window: int = 8

    def _rule(self, steps_per_epoch: int) -> Memory:
        from vestige.memory.uniform import UniformMemory

        return UniformMemory(self.window)
