"""How the clip bounds of a run change from step to step: by a public table, or after releases.

Guarantee: the bounds of step t are known before its lot is drawn, from public settings and earlier
releases alone (`RawPercentile` excepted, which is there for study and is not private); the noise of
step t is in units of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vestige.checks import check_state
from vestige.errors import ConfigError
from vestige.gradients.clipping import Quantile
from vestige.release.door import Release


class ClipControl(ABC):
    """Says what the bounds of the next step are."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)

    def learn(self, release: Release) -> None:
        """A release has come: set the bounds of the next step."""
        if not isinstance(release, Release):
            raise TypeError(f"clip bounds follow releases only, not a {type(release).__name__}")
        self.bounds = self._next(release)

    @abstractmethod
    def _next(self, release: Release) -> tuple[float, ...]:
        """The bounds after this release."""

    def state_dict(self) -> dict[str, Any]:
        """The bounds. They are public."""
        return {"bounds": list(self.bounds)}

    def check_state(self, state: Any) -> None:
        """Refuse saved bounds that do not fit, before anything is changed."""
        check_state("clip control", state, self.state_dict())
        if min(state["bounds"]) <= 0:
            raise ConfigError(
                f"the saved clip bounds {state['bounds']} are not all above 0: they were damaged."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from saved bounds that `check_state` has let through."""
        self.bounds = tuple(float(c) for c in state["bounds"])


class ClipSchedule(ClipControl):
    """The first bounds times a public factor for each step; the last factor holds beyond."""

    def __init__(self, bounds: Sequence[float], factors: Sequence[float]) -> None:
        self._first, self._factors = tuple(bounds), tuple(factors)
        super().__init__(self._at(0))

    def _at(self, step: int) -> tuple[float, ...]:
        factor = self._factors[min(step, len(self._factors) - 1)]
        return tuple(c * factor for c in self._first)

    def _next(self, release: Release) -> tuple[float, ...]:
        return self._at(release.step + 1)


class QuantileControl(ClipControl):
    """Andrew et al. 2021: geometric steps toward the target quantile, from noisy counts."""

    def __init__(self, bounds: Sequence[float], rule: Quantile, batch_size: int) -> None:
        super().__init__(bounds)
        self._rule, self._batch_size = rule, batch_size
        self.fractions: tuple[float, ...] = ()  # of the last release: unclipped, by group

    def _next(self, release: Release) -> tuple[float, ...]:
        assert release.counts is not None
        rule = self._rule
        self.fractions = tuple(
            min(max(count / self._batch_size + 0.5, 0.0), 1.0) for count in release.counts
        )
        return tuple(
            min(max(c * math.exp(-rule.rate * (f - rule.target)), rule.lowest), rule.highest)
            for c, f in zip(self.bounds, self.fractions, strict=True)
        )


class RawPercentile(ClipControl):
    """DP-Adam-AC as published: the bound is a percentile of the last raw norms. NOT private."""

    def __init__(
        self,
        bounds: Sequence[float],
        quantile: float,
        window: int,
        limits: tuple[float, float],
    ) -> None:
        super().__init__(bounds)
        self._quantile, self._limits = quantile, limits
        self._norms: deque[float] = deque(maxlen=window)
        self.clipped = 0.0  # the fraction of the last lot

    def look(self, norms: Sequence[float]) -> None:
        """See the raw norms of a lot."""
        self._norms.extend(norms)
        over = sum(norm > self.bounds[0] for norm in norms)
        self.clipped = over / len(norms) if norms else 0.0

    def _next(self, release: Release) -> tuple[float, ...]:
        if not self._norms:
            return self.bounds
        found = float(np.quantile(np.array(self._norms), self._quantile))
        return (min(max(found, self._limits[0]), self._limits[1]),)
