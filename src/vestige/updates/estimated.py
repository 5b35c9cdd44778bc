"""A filter's estimate as the memory in the query: the branch of the next step is (1 - beta) times
what the filter makes of the releases so far.

    observation   y_t = (release_t - branch_t) / beta_t,   the release of DP-SGD at sigma / beta
    branch_(t+1) = (1 - beta_(t+1)) * estimate(y_0, ..., y_t)

Guarantee: the estimate is a function of releases, so every release is charged at sigma / beta.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vestige.plan import Table, at
from vestige.release.door import Branch, Position, Release, recalled
from vestige.release.part import Gradient, Part
from vestige.updates.filters import Filter


class EstimatedMemory(Part):
    """A filter at work as a memory; `share` is beta."""

    name, what = "memory", "memory"
    saved = ("filter", "estimate")

    def __init__(self, filter: Filter, like: Tensor, share: Table, position: Position) -> None:
        self.filter, self._share, self._position = filter, share, position
        self.estimate = torch.zeros_like(like)
        self._mixed = torch.zeros_like(like)
        self._recalled: Branch | None = None
        self._last: dict[str, Any] = {}

    @property
    def branch(self) -> Branch | None:
        """What is mixed into the query of the next step."""
        return self._recalled

    @torch.no_grad()
    def lot_begins(self) -> None:
        """Make the branch of this step; there is none before the first release."""
        rest = 1 - at(self._share, self._position.release)
        self._recalled = None
        if self.filter.count and rest:
            torch.mul(self.estimate, rest, out=self._mixed)
            step = self._position.release
            self._recalled = recalled(self._mixed, step)

    def stepped(self) -> None:
        """Make the branch of the next step."""
        self.lot_begins()

    @torch.no_grad()
    def released(self, release: Release, gradient: Gradient) -> None:
        """Let the filter see what DP-SGD at sigma / beta would have released."""
        if not isinstance(release, Release):
            raise TypeError(f"a memory keeps releases only, not a {type(release).__name__}")
        beta = at(self._share, release.step)
        observed = release.values.clone()
        mixed = 0.0
        if self._recalled is not None:
            observed.sub_(self._recalled.values)
            mixed = float(self._recalled.values.norm())
        stds = tuple(std / beta for std in release.stds)
        self.filter.see(observed.div_(beta), stds, self.estimate)
        norm = float(release.values.norm())
        self._last = {
            "groups": ["all"],
            "step": release.step,
            "beta": beta,
            "memory_ratio": [mixed / norm if norm else 0.0],
        }

    def diagnostics(self) -> dict[str, Any]:
        """The last step's numbers: all of them public."""
        return dict(self._last)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved memory; the branch is made when the next lot is handed out."""
        super().load_state_dict(state)
        self._recalled, self._last = None, {}
