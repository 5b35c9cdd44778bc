"""DP-SAM: the gradient is taken uphill of the weights, in the direction of a noisy gradient.

    y1 = clipped sum at theta + noise,    e = radius * y1 / |y1|
    y2 = clipped sum at theta + e + noise,    theta <- theta - lr * y2 / L

`sample="same"` looks at one lot twice, in `optimizer.step(closure)`. `sample="fresh"` needs no
closure: every other lot gives the direction and moves nothing, the next one is taken uphill.

`dp-sam-per-example` moves each example along its own gradient instead, without noise, inside the
clip: g_i(theta + radius * g_i(theta) / |g_i(theta)|) is one example's vector like any other.

Paper: Park et al., ICML 2023, arXiv 2306.05651 (radius: rho there, 0.01 to 0.1).
Guarantee: same sample: the two noisy sums of one lot are one Gaussian release at sigma / sqrt(2).
Fresh sample: two releases at sigma. Per example: one release at sigma.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vestige.errors import ConfigError
from vestige.methods.base import AT_SIGMA, Method, Surroundings
from vestige.methods.checks import check_non_negative

if TYPE_CHECKING:
    from torch.optim import Optimizer

    from vestige.gradients import Capture
    from vestige.release.door import Release
    from vestige.updates.ascent import Ascent
    from vestige.updates.passes import Passes

SAMPLES = ("same", "fresh")


class _Sharpness(Method):
    """What the two share: the radius and SGD."""

    radius: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_non_negative("radius", self.radius)

    def optimizer_class(self) -> type[Optimizer]:
        """torch.optim.SGD."""
        import torch

        return torch.optim.SGD


@dataclass(frozen=True)
class DPSAM(_Sharpness):
    """Sharpness-aware DP-SGD. Proven: one subsampled Gaussian at sigma/sqrt(2), or two at sigma."""

    name: ClassVar[str] = "dp-sam"
    paper: ClassVar[str] = "Park et al. 2023, arXiv 2306.05651"
    guarantee: ClassVar[str] = (
        "proven: one subsampled Gaussian at sigma/sqrt(2) (same sample) or two at sigma (fresh)"
    )
    summary: ClassVar[str] = "gradients uphill along a noisy gradient; needs step(closure)"
    touches: ClassVar[int] = 2
    extra_memory: ClassVar[str] = "3 x parameters"

    radius: float = 0.05
    sample: str = "same"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sample not in SAMPLES:
            raise ConfigError(
                f"sample={self.sample!r} must be 'same' (one lot, looked at twice) or 'fresh' (a "
                "second lot)."
            )

    @property
    def looks(self) -> int:
        """Two at the same lot, or one at each of two."""
        return 2 if self.sample == "same" else 1

    @property
    def needs_closure(self) -> bool:
        """The same lot is evaluated twice."""
        return self.sample == "same"

    @property
    def alternates(self) -> bool:
        """A fresh lot gives the direction."""
        return self.sample == "fresh"

    def ascent(self, around: Surroundings) -> Ascent:
        """What moves the weights."""
        from vestige.updates.ascent import Ascent

        return Ascent(around.slots, around.like, self.radius)

    def passes(self, capture: Capture, look: Callable[[], Release], ascent: Any) -> Passes | None:
        """A noisy first look, the climb, and the gradient there."""
        from vestige.updates.passes import SameSample

        return SameSample(capture, ascent, look) if self.needs_closure else None


@dataclass(frozen=True)
class DPSAMPerExample(_Sharpness):
    """SAM inside every example's gradient. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-sam-per-example"
    paper: ClassVar[str] = "after Park et al. 2023, arXiv 2306.05651; this form is ours"
    guarantee: ClassVar[str] = AT_SIGMA
    summary: ClassVar[str] = "each example's gradient uphill of its own; needs step(closure)"
    touches: ClassVar[int] = 2
    extra_memory: ClassVar[str] = "2 x rows x parameters"

    radius: float = 0.05

    @property
    def needs_closure(self) -> bool:
        """Each batch is evaluated twice."""
        return True

    def passes(self, capture: Capture, look: Callable[[], Release], ascent: Any) -> Passes:
        """Two passes with weights of its own for each row."""
        from vestige.updates.passes import OwnAscent

        return OwnAscent(capture, self.radius)
