"""The Adam family: the release divided by the lot is Adam's gradient.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  theta <- theta - lr m^ / (sqrt(v^) + eps)

AdamW adds decoupled weight decay. v is mostly noise when the noise dominates: see dp-adambc.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated

import torch

from vestige.checks import is_number
from vestige.gradients.clipping import Quantile
from vestige.methods.catalogue import METHODS
from vestige.methods.method import WHOLE_GRADIENT, BuildContext, Feature, Method
from vestige.methods.settings import Count, Inside, Positive, must_be
from vestige.plan import needs_steps
from vestige.release.part import Part
from vestige.updates.adam import AdamBC, AdamWBC
from vestige.updates.control import ClipControl, RateControl, RawPercentile


@dataclass(frozen=True)
class DPAdam(Method):
    """Adam on releases: the standard construction."""

    info = METHODS["dp-adam"]
    optimizer_class = torch.optim.Adam
    whole = ""


@dataclass(frozen=True)
class DPAdamW(Method):
    """AdamW on releases. Paper: Chooi et al. 2025, arXiv 2511.07843."""

    info = METHODS["dp-adamw"]
    optimizer_class = torch.optim.AdamW
    whole = ""


@dataclass(frozen=True)
class DPAdamBC(Method):
    """Adam with the noise taken out of its second moment (`AdamBC`). Paper: arXiv 2312.14334."""

    info = METHODS["dp-adambc"]
    optimizer_class = AdamBC
    whole = "knows the noise of whole parameters"


@dataclass(frozen=True)
class DPAdamWBC(Method):
    """DP-AdamBC with decoupled weight decay. Paper: Chooi et al. 2025, arXiv 2511.07843."""

    info = METHODS["dp-adamw-bc"]
    optimizer_class = AdamWBC
    whole = "knows the noise of whole parameters"


@dataclass(frozen=True)
class ADPAdamW(Method):
    """DP-AdamW under public schedules of the noise and of the clip bound.

        sigma_t = sigma * start^(1 - t / (T - 1)):  from start * sigma at the first step to sigma
        C_t = C * clip_start^(1 - t / (T - 1)):     from clip_start * C to C

    Every step is charged at its own sigma_t, in units of its own C_t. Pass `steps`;
    `make_private_with_epsilon` solves for sigma.

    Paper: named in the FO paper after Chilukoti et al. 2025, arXiv 2502.11329. How that work adapts
    could not be established; falling public schedules are the most plausible reading and are ours.
    """

    info = METHODS["adp-adamw"]
    optimizer_class = torch.optim.AdamW
    whole = ""

    start: Annotated[
        float,
        must_be(
            "a finite number of at least 1: the noise of the first step over that of the last",
            lambda v: is_number(v) and v >= 1,
        ),
    ] = 2.0
    clip_start: Positive = 1.0

    def excludes(self) -> Mapping[Feature, str]:
        """Two things that move the clip bound."""
        if self.clip_start == 1:
            return {}
        return {
            Feature.QUANTILE: (
                "has a schedule of its clip bound, which quantile clipping would move as well: use "
                "one of them."
            )
        }

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


class _AdaptiveClipping(Method):
    """AdamW whose clip bound and learning rate follow the gradients' norms.

        C <- the (1 - clipped) quantile of the last norms, within [lowest, highest]
        learning rate <- higher where fewer than `clipped` - band of the examples were clipped,
        lower where more than `clipped` + band were

    The published method also evaluates an average of the weights: pass averaging="ema".

    Paper: Yang 2025, arXiv 2510.05288; constants from a third-party port. The published
    micro-batches are single examples here.
    """

    optimizer_class = torch.optim.AdamW
    whole = "moves its bound by norms of the lot, which are kept apart from its sum"

    clipped: float
    band: float

    def _rate_control(self, clip: ClipControl, context: BuildContext) -> RateControl:
        return RateControl(clip, context.optimizer, self.clipped, self.band)


@dataclass(frozen=True)
class DPAdamAC(_AdaptiveClipping):
    """DP-Adam-AC as published. NOT private: raw norms steer the clip and the step size."""

    info = METHODS["dp-adam-ac"]

    clipped: Inside = 0.2
    band: Inside = 0.1
    window: Count = 1000
    lowest: Positive = 0.1
    highest: Positive = 10.0

    def excludes(self) -> Mapping[Feature, str]:
        """A second thing that moves the clip bound."""
        return {
            **WHOLE_GRADIENT,
            Feature.MOVING_CLIP: "moves its clip bound itself: leave clipping={value} out.",
        }

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """The percentile of the last raw norms, which is not private, and the rate's control."""
        collector, bounds = context.capture.collector, context.clip.bounds
        limits = (self.lowest, self.highest)
        clip = RawPercentile(bounds, collector, 1 - self.clipped, int(self.window), limits)
        return [clip, self._rate_control(clip, context)]


@dataclass(frozen=True)
class DPAdamACPrivate(_AdaptiveClipping):
    """DP-Adam-AC from noisy counts (quantile clipping), which are part of every charge."""

    info = METHODS["dp-adam-ac-private"]
    clipping = Quantile(target=0.8, lowest=0.1, highest=10.0)

    clipped: Inside = 0.2
    band: Inside = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        own = replace(self.clipping, target=1 - self.clipped)
        object.__setattr__(self, "clipping", own)

    def excludes(self) -> Mapping[Feature, str]:
        """Groups: one count steers one rate."""
        return WHOLE_GRADIENT

    def requires(self) -> Mapping[Feature, str]:
        """The counts of quantile clipping."""
        return {
            Feature.QUANTILE: (
                "follows the counts of quantile clipping: leave clipping out, or pass "
                "vestige.gradients.clipping.Quantile(...)."
            )
        }

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """The rate's control; the bounds are moved by the counts."""
        assert context.clip_control is not None
        return [self._rate_control(context.clip_control, context)]
