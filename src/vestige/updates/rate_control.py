"""A multiplier of the learning rate that follows the fraction of clipped examples.

    clipped < target - band:  multiplier <- min(highest, 1.01 * multiplier)
    clipped > target + band:  multiplier <- max(lowest, 0.995 * multiplier)

Paper: DP-Adam-AC, arXiv 2510.05288; the constants are those of a third-party port.
Guarantee: none of its own. Fed with a noisy fraction it is post-processing; fed with the true one,
as published, it is not private.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.optim import Optimizer

from vestige.checks import check_state
from vestige.errors import ConfigError


class RateControl:
    """Scales the learning rates during a step and puts them back after it."""

    def __init__(
        self, target: float = 0.2, band: float = 0.1, lowest: float = 0.1, highest: float = 2.0
    ) -> None:
        self._low, self._high = target - band, target + band
        self._range = lowest, highest
        self.multiplier = 1.0
        self._rates: list[Any] | None = None  # of the optimizer's groups, while they are scaled

    def learn(self, clipped: float) -> None:
        """Follow the fraction of clipped examples."""
        if clipped < self._low:
            self.multiplier = min(self._range[1], 1.01 * self.multiplier)
        elif clipped > self._high:
            self.multiplier = max(self._range[0], 0.995 * self.multiplier)

    def scale(self, optimizer: Optimizer) -> None:
        """Multiply the learning rates, for one step."""
        self.restore(optimizer)
        self._rates = [group["lr"] for group in optimizer.param_groups]
        for group in optimizer.param_groups:
            group["lr"] = group["lr"] * self.multiplier

    def restore(self, optimizer: Optimizer) -> None:
        """Put the learning rates back."""
        if self._rates is not None:
            for group, rate in zip(optimizer.param_groups, self._rates, strict=False):
                group["lr"] = rate
            self._rates = None

    def state_dict(self) -> dict[str, Any]:
        """The multiplier."""
        return {"multiplier": self.multiplier}

    def check_state(self, state: Any) -> None:
        """Refuse a saved multiplier that is none, before anything is changed."""
        check_state("rate control", state, self.state_dict())
        if state["multiplier"] <= 0:
            raise ConfigError(
                f"the saved rate multiplier {state['multiplier']!r} is no positive number."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved multiplier that `check_state` has let through."""
        self.multiplier = float(state["multiplier"])
