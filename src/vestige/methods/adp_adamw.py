"""ADP-AdamW: DP-AdamW under public schedules of the noise and of the clip bound.

    sigma_t = sigma * start^(1 - t / (T - 1)):  from start * sigma at the first step to sigma
    C_t = C * clip_start^(1 - t / (T - 1)):     from clip_start * C to C

Every step is charged at its own sigma_t, in units of its own C_t. Pass `steps`;
`make_private_with_epsilon` solves for sigma.

Paper: named in the FO paper after Chilukoti et al. 2025, arXiv 2502.11329. How that work adapts
could not be established; falling public schedules are the most plausible reading and are ours.
Guarantee: composition of Poisson-subsampled Gaussian releases at sigma_t, fixed in advance.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.methods.base import Method
from vestige.methods.checks import check_positive
from vestige.plan import needs_steps

if TYPE_CHECKING:
    from torch.optim import Optimizer


@dataclass(frozen=True)
class ADPAdamW(Method):
    """AdamW with falling noise. Proven: subsampled Gaussians at sigma_t, step by step."""

    name: ClassVar[str] = "adp-adamw"
    paper: ClassVar[str] = "after Chilukoti et al. 2025, arXiv 2502.11329 (rule not established)"
    guarantee: ClassVar[str] = (
        "proven: composition of Poisson-subsampled Gaussian releases at sigma_t"
    )
    summary: ClassVar[str] = "dp-adamw with noise that falls during the run"
    extra_memory: ClassVar[str] = "2 x parameters (Adam's own)"
    default_lr: ClassVar[float] = 0.01

    start: float = 2.0
    clip_start: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.start) or self.start < 1:
            raise ConfigError(
                f"start={self.start!r} must be a finite number of at least 1: the noise of the "
                "first step over that of the last."
            )
        check_positive("clip_start", self.clip_start)

    def optimizer_class(self) -> type[Optimizer]:
        """torch.optim.AdamW."""
        import torch

        return torch.optim.AdamW

    def noise_shape(self, steps: int | None) -> tuple[float, ...]:
        """start^(1 - t / (T - 1))."""
        return self._falling(self.start, steps)

    def clip_shape(self, steps: int | None) -> tuple[float, ...] | None:
        """clip_start^(1 - t / (T - 1)); None where the bound stays."""
        return None if self.clip_start == 1 else self._falling(self.clip_start, steps)

    def _falling(self, start: float, steps: int | None) -> tuple[float, ...]:
        count = needs_steps(f"the noise of method {self.name!r}", steps)
        last = max(count - 1, 1)
        return tuple(start ** (1 - t / last) for t in range(count)) if count > 1 else (1.0,)
