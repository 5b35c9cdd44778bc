"""DP-Adam-AC: AdamW whose clip bound and learning rate follow the gradients' norms.

    C <- the (1 - clipped) quantile of the last norms, within [lowest, highest]
    learning rate <- higher where fewer than `clipped` - band of the examples were clipped, lower
    where more than `clipped` + band were

`dp-adam-ac` does this as published, with the raw norms: the noise scale and the step size then tell
about the data, and nothing is charged for it. NOT private: epsilon is infinite.
`dp-adam-ac-private` follows noisy counts (quantile clipping), which are part of every charge.

The published method also evaluates an average of the weights: pass averaging="ema".

Paper: Yang 2025, arXiv 2510.05288; constants from a third-party port. The published micro-batches
are single examples here.
Guarantee: as published, none. Private version: 1/z^2 = 1/sigma^2 + 1/(2 count_noise)^2 per step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.gradients.clip_forms import Clipping, Quantile
from vestige.methods.base import Method
from vestige.methods.checks import check_positive

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from vestige.updates.clip_control import RawPercentile
    from vestige.updates.rate_control import RateControl


class _AdaptiveClipping(Method):
    """What the two share: AdamW and the control of the learning rate."""

    clipped: float
    band: float

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("clipped", "band"):
            value = getattr(self, name)
            if not is_number(value) or not 0 < value < 1:
                raise ConfigError(f"{name}={value!r} must be strictly between 0 and 1.")

    def optimizer_class(self) -> type[Optimizer]:
        """torch.optim.AdamW."""
        import torch

        return torch.optim.AdamW

    def rate_control(self) -> RateControl:
        """The multiplier of the learning rate."""
        from vestige.updates.rate_control import RateControl

        return RateControl(self.clipped, self.band)


@dataclass(frozen=True)
class DPAdamAC(_AdaptiveClipping):
    """Adaptive clipping as published. NOT private: raw norms steer the clip and the step size."""

    name: ClassVar[str] = "dp-adam-ac"
    paper: ClassVar[str] = "Yang 2025, arXiv 2510.05288"
    guarantee: ClassVar[str] = "not private as published: raw norms steer clip and step size"
    summary: ClassVar[str] = "adaptive clipping by raw norms, for study"
    extra_memory: ClassVar[str] = "2 x parameters (Adam's own)"
    default_lr: ClassVar[float] = 0.01
    private: ClassVar[bool] = False
    flat_only: ClassVar[bool] = True

    clipped: float = 0.2
    band: float = 0.1
    window: int = 1000
    lowest: float = 0.1
    highest: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("window", "lowest", "highest"):
            check_positive(name, getattr(self, name))

    def clip_control(self, bounds: Sequence[float]) -> RawPercentile:
        """The percentile of the last raw norms: not private."""
        from vestige.updates.clip_control import RawPercentile

        limits = (self.lowest, self.highest)
        return RawPercentile(bounds, 1 - self.clipped, int(self.window), limits)


@dataclass(frozen=True)
class DPAdamACPrivate(_AdaptiveClipping):
    """Adaptive clipping from noisy counts. Proven: sum and count as one subsampled Gaussian."""

    name: ClassVar[str] = "dp-adam-ac-private"
    paper: ClassVar[str] = "after Yang 2025, arXiv 2510.05288, and Andrew et al., arXiv 1905.03871"
    guarantee: ClassVar[str] = (
        "proven: subsampled Gaussians, 1/z^2 = 1/sigma^2 + 1/(2 count_noise)^2"
    )
    summary: ClassVar[str] = "AdamW, clip and learning rate steered by a noisy count"
    extra_memory: ClassVar[str] = "2 x parameters (Adam's own)"
    default_lr: ClassVar[float] = 0.01
    clipping: ClassVar[Clipping] = Quantile(target=0.8, lowest=0.1, highest=10.0)
    flat_only: ClassVar[bool] = True

    clipped: float = 0.2
    band: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        own = replace(self.clipping, target=1 - self.clipped)  # type: ignore[type-var]
        object.__setattr__(self, "clipping", own)
