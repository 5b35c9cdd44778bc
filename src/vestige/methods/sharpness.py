"""Sharpness-aware methods and DiSK: gradients are taken at weights that were moved first."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar, cast

import torch

from vestige.methods.catalogue import METHODS
from vestige.methods.method import OWN_FILTER, BuildContext, Feature, Method
from vestige.methods.settings import NonNegative, Positive, Share, must_be
from vestige.release.part import Part
from vestige.updates.ascent import AlternatingAscent, Ascent
from vestige.updates.filters import RunningMean
from vestige.updates.passes import OwnAscent, Passes, SameSample, TwoPoints


class _Sharpness(Method):
    """What the four share: the radius and SGD."""

    optimizer_class = torch.optim.SGD
    whole = "climbs by the norm of a whole release"

    radius: float


@dataclass(frozen=True)
class DPSAT(_Sharpness):
    """Sharpness-aware training in one pass: climb along the last release, then take the step.

        e = radius * y_(t-1) / |y_(t-1)|;   y_t = sum of clipped gradients at theta + e, plus noise
        theta <- theta - lr * y_t / lot                         (from theta, not from theta + e)

    Paper: Park et al., ICML 2023, arXiv 2306.05651, and its code (radius 0.03 there, too).
    """

    info = METHODS["dp-sat"]
    displacement: ClassVar[bool] = False

    radius: NonNegative = 0.03

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """What moves the weights."""
        slots = context.groups.slots
        return [Ascent(slots, context.like, self.radius, self.displacement)]


@dataclass(frozen=True)
class DPSATMomentum(DPSAT):
    """DP-SAT back along the last step of the weights, theta_(t-1) - theta_t."""

    info = METHODS["dp-sat-momentum"]
    displacement: ClassVar[bool] = True


@dataclass(frozen=True)
class DPSAM(_Sharpness):
    """DP-SAM: the gradient is taken uphill of the weights, along a noisy gradient.

        y1 = clipped sum at theta + noise,    e = radius * y1 / |y1|
        y2 = clipped sum at theta + e + noise,    theta <- theta - lr * y2 / L

    `sample="same"` looks at one lot twice, in `optimizer.step(closure)`. `sample="fresh"` needs no
    closure: every other lot gives the direction and moves nothing, the next one is taken uphill.

    Paper: Park et al., ICML 2023, arXiv 2306.05651 (radius: rho there, 0.01 to 0.1).
    """

    info = METHODS["dp-sam"]

    radius: NonNegative = 0.05
    sample: Annotated[
        str,
        must_be(
            "'same' (one lot, looked at twice) or 'fresh' (a second lot)",
            lambda v: v in ("same", "fresh"),
        ),
    ] = "same"

    @property
    def looks(self) -> int:
        """Two at the same lot, or one at each of two."""
        return 2 if self.sample == "same" else 1

    @property
    def needs_closure(self) -> bool:
        """The same lot is evaluated twice."""
        return self.sample == "same"

    def excludes(self) -> Mapping[Feature, str]:
        """Pieces of a lot that is looked at twice."""
        if self.sample == "fresh":
            return {}
        return {
            Feature.PHYSICAL_BATCHES: (
                "looks at every lot twice and needs it in one piece: leave "
                "max_physical_batch_size={value} out, use sample='fresh', or dp-sat."
            )
        }

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """What moves the weights."""
        slots = context.groups.slots
        if self.sample == "fresh":
            return [AlternatingAscent(slots, context.like, self.radius)]
        return [Ascent(slots, context.like, self.radius, led=True)]

    def passes(self, context: BuildContext, parts: Sequence[Part]) -> Passes | None:
        """A noisy first look, the climb, and the gradient there."""
        if self.sample == "fresh":
            return None
        return SameSample(context.capture, cast("Ascent", parts[0]))


@dataclass(frozen=True)
class DPSAMPerExample(_Sharpness):
    """SAM inside every example's gradient: g_i(theta + radius * g_i / |g_i|), clipped."""

    info = METHODS["dp-sam-per-example"]

    radius: float = 0.05

    @property
    def needs_closure(self) -> bool:
        """Each batch is evaluated twice."""
        return True

    def passes(self, context: BuildContext, parts: Sequence[Part]) -> Passes:
        """Two passes with weights of its own for each row."""
        return OwnAscent(context.capture, self.radius)


@dataclass(frozen=True)
class Disk(Method):
    """DiSK: gradients from a look-ahead point, averaged by a simplified Kalman filter.

        d = theta_t - theta_(t-1),    c = (1 - gain) / (gain * ahead)
        u_i = c * gradient at theta_t + ahead * d  +  (1 - c) * gradient at theta_t, clipped as one
        y_t = sum of clipped u_i, plus noise;  m <- (1 - gain) m + gain * y_t   (m = y_0 at step 0)

    `ahead` None is (1 - gain) / gain: then c = 1, one pass suffices, and the ordinary loop works.
    Any other `ahead` evaluates the batch twice, in `optimizer.step(closure)`.

    Paper: Zhang et al., DiSK, ICLR 2025, arXiv 2410.03883 (kappa = gain, 0.7; gamma = ahead, 0.5).
    """

    info = METHODS["disk"]
    whole = "looks ahead along a whole release"

    gain: Share = 0.7
    ahead: Positive | None = None

    @property
    def weight(self) -> float:
        """c: the weight of the gradient at the look-ahead point."""
        return 1.0 if self.ahead is None else (1 - self.gain) / (self.gain * self.ahead)

    @property
    def needs_closure(self) -> bool:
        """Two points are two passes."""
        return self.weight != 1

    def excludes(self) -> Mapping[Feature, str]:
        """A second filter."""
        return OWN_FILTER

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """The way ahead, against the way back, and the average."""
        distance = (1 - self.gain) / self.gain if self.ahead is None else self.ahead
        ascent = Ascent(
            context.groups.slots,
            context.like,
            -distance,
            displacement=True,
            normalised=False,
            led=self.needs_closure,
        )
        return [ascent, RunningMean(context.like, self.gain)]

    def passes(self, context: BuildContext, parts: Sequence[Part]) -> Passes | None:
        """The gradient here and ahead, combined example by example."""
        if not self.needs_closure:
            return None
        return TwoPoints(context.capture, cast("Ascent", parts[0]), self.weight)
