"""A filter turns the releases, one by one, into what the optimizer gets.

Guarantee: a function of the releases alone, so it costs nothing: a run with a filter has the
epsilon of the run without.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.checks import check_state
from vestige.release.door import Release


class Filter(ABC):
    """Keeps what it needs of the past, as named tensors in `state`, and the number of releases."""

    def __init__(self) -> None:
        self.count = 0
        self.state: dict[str, Tensor] = {}

    @torch.no_grad()
    def apply(self, release: Release, out: Tensor) -> None:
        """Write the filtered release into `out`."""
        if not isinstance(release, Release):
            raise TypeError(f"a filter takes releases only, not a {type(release).__name__}")
        self.see(release.values, release.stds, out)

    def see(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        """Write what the filter makes of a function of releases with noise of `stds` into `out`."""
        self._filter(values, stds, out)
        self.count += 1

    @abstractmethod
    def noise_powers(self, groups: int) -> list[float]:
        """How much of a release's noise variance is in the last output, in each of the groups."""

    @abstractmethod
    def _filter(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        """The filter itself; `out` is not the values' own memory."""

    def state_dict(self) -> dict[str, Any]:
        """Everything, as tensors and numbers. All of it is public."""
        return {"count": self.count, **{name: value.clone() for name, value in self.state.items()}}

    def check_state(self, state: Any) -> None:
        """Refuse a saved filter that does not fit, before anything is changed."""
        check_state("filter", state, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved filter that `check_state` has let through."""
        self.count = state["count"]
        for name, value in self.state.items():
            value.copy_(state[name])


class RunningMean(Filter):
    """mean <- mean + gain * (release - mean), started at the first release."""

    def __init__(self, like: Tensor, gain: float) -> None:
        super().__init__()
        self._gain = gain
        self.state = {
            "mean": torch.zeros_like(like),
            "power": torch.zeros(1, dtype=torch.float64),
        }

    def noise_powers(self, groups: int) -> list[float]:
        """The same in all groups."""
        return [float(self.state["power"])] * groups

    def _filter(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        gain = self._gain if self.count else 1.0
        self.state["mean"].lerp_(values, gain)
        self.state["power"].mul_((1 - gain) ** 2).add_(gain**2)
        out.copy_(self.state["mean"])
