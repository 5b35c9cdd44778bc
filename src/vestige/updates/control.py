"""How clip bounds and learning rates change from step to step: by a public table, or by releases.

Guarantee: the bounds of step t are known before its lot is drawn, from public settings and earlier
releases alone (`RawPercentile` excepted, which is there for study and is not private); the noise of
step t is in units of them.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from torch.optim import Optimizer

from vestige.errors import ConfigError
from vestige.gradients.clipping import Quantile
from vestige.gradients.collector import Collector
from vestige.release.door import Release
from vestige.release.part import Gradient, Part


class ClipControl(Part):
    """Says what the bounds of the next step are, and sets them when its lot begins."""

    name, what = "clip", "clip bounds"
    saved = ("bounds",)
    clipped = 0.0  # the fraction of examples that were clipped in the last lot

    def __init__(self, bounds: Sequence[float], collector: Collector) -> None:
        self.bounds, self._collector = tuple(bounds), collector

    def lot_begins(self) -> None:
        """Clip at the bounds that the last release left."""
        self._collector.clip = replace(self._collector.clip, bounds=self.bounds)

    def released(self, release: Release, gradient: Gradient) -> None:
        """A release has come: set the bounds of the next step."""
        if not isinstance(release, Release):
            raise TypeError(f"clip bounds follow releases only, not a {type(release).__name__}")
        self.bounds = self._next(release)

    @abstractmethod
    def _next(self, release: Release) -> tuple[float, ...]:
        """The bounds after this release."""

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse saved bounds that do not fit or are not positive."""
        super().check_state(state, releases)
        if any(bound <= 0 for bound in state["bounds"]):
            raise ConfigError(f"the saved clip bounds {state['bounds']} are not positive: damaged.")


class ClipSchedule(ClipControl):
    """The first bounds times a public factor for each step; the last factor holds beyond."""

    def __init__(
        self, bounds: Sequence[float], collector: Collector, factors: Sequence[float]
    ) -> None:
        self._first, self._factors = tuple(bounds), tuple(factors)
        super().__init__(self._at(0), collector)

    def _at(self, step: int) -> tuple[float, ...]:
        factor = self._factors[min(step, len(self._factors) - 1)]
        return tuple(c * factor for c in self._first)

    def _next(self, release: Release) -> tuple[float, ...]:
        return self._at(release.step + 1)


class QuantileControl(ClipControl):
    """Andrew et al. 2021: geometric steps toward the target quantile, from noisy counts."""

    def __init__(
        self, bounds: Sequence[float], collector: Collector, rule: Quantile, batch_size: int
    ) -> None:
        super().__init__(bounds, collector)
        self._rule, self._batch_size = rule, batch_size
        self.fractions: tuple[float, ...] = ()  # of the last release: unclipped, by group
        collector.count_unclipped()

    def _next(self, release: Release) -> tuple[float, ...]:
        assert release.counts is not None
        rule = self._rule
        self.fractions = tuple(
            min(max(count / self._batch_size + 0.5, 0.0), 1.0) for count in release.counts
        )
        self.clipped = 1 - self.fractions[0]
        return tuple(
            min(max(c * math.exp(-rule.rate * (f - rule.target)), rule.lowest), rule.highest)
            for c, f in zip(self.bounds, self.fractions, strict=True)
        )


class RawPercentile(ClipControl):
    """DP-Adam-AC as published: the bound is a percentile of the last raw norms. NOT private."""

    def __init__(
        self,
        bounds: Sequence[float],
        collector: Collector,
        quantile: float,
        window: int,
        limits: tuple[float, float],
    ) -> None:
        super().__init__(bounds, collector)
        self._quantile, self._limits = quantile, limits
        self._norms: deque[float] = deque(maxlen=window)
        collector.norms = []  # from now on it keeps the raw norms of a lot

    def _next(self, release: Release) -> tuple[float, ...]:
        norms = self._collector.norms or []
        self._norms.extend(norms)
        over = sum(norm > self.bounds[0] for norm in norms)
        self.clipped = over / len(norms) if norms else 0.0
        if not self._norms:
            return self.bounds
        found = float(np.quantile(np.array(self._norms), self._quantile))
        return (min(max(found, self._limits[0]), self._limits[1]),)


class RateControl(Part):
    """A multiplier of the learning rates that follows the fraction of clipped examples.

        clipped < target - band:  multiplier <- min(highest, 1.01 * multiplier)
        clipped > target + band:  multiplier <- max(lowest, 0.995 * multiplier)

    Paper: DP-Adam-AC, arXiv 2510.05288; the constants are those of a third-party port.
    Guarantee: none of its own. Fed with a noisy fraction it is post-processing; fed with the true
    one, as published, it is not private.
    """

    name, what = "rate", "rate multiplier"
    saved = ("multiplier",)
    lowest, highest = 0.1, 2.0

    def __init__(
        self, clip: ClipControl, optimizer: Optimizer, target: float = 0.2, band: float = 0.1
    ) -> None:
        self._clip, self._optimizer = clip, optimizer
        self._low, self._high = target - band, target + band
        self.multiplier = 1.0
        self._rates: list[Any] | None = None  # of the optimizer's groups, while they are scaled

    def lot_begins(self) -> None:
        """Put the learning rates of a step that failed back."""
        self._restore()

    def lot_ends(self) -> None:
        """Put the learning rates back."""
        self._restore()

    def stepped(self) -> None:
        """Put the learning rates back."""
        self._restore()

    def released(self, release: Release, gradient: Gradient) -> None:
        """Scale the learning rates for this step, and learn the multiplier of the next."""
        self._restore()
        self._rates = [group["lr"] for group in self._optimizer.param_groups]
        for group in self._optimizer.param_groups:
            group["lr"] = group["lr"] * self.multiplier
        self.learn(self._clip.clipped)

    def learn(self, clipped: float) -> None:
        """Follow the fraction of clipped examples."""
        if clipped < self._low:
            self.multiplier = min(self.highest, 1.01 * self.multiplier)
        elif clipped > self._high:
            self.multiplier = max(self.lowest, 0.995 * self.multiplier)

    def _restore(self) -> None:
        if self._rates is not None:
            for group, rate in zip(self._optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate
            self._rates = None

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse a saved multiplier that is no positive number."""
        super().check_state(state, releases)
        if state["multiplier"] <= 0:
            raise ConfigError(
                f"the saved rate multiplier {state['multiplier']!r} is no positive number."
            )
