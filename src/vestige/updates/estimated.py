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

from vestige.checks import check_state
from vestige.plan import Table, at
from vestige.release.door import Branch, Release, recalled
from vestige.updates.filters import Filter


class EstimatedMemory:
    """A filter at work as a memory; `share` is beta."""

    def __init__(self, filter: Filter, like: Tensor, share: Table) -> None:
        self._filter, self._share = filter, share
        self._estimate = torch.zeros_like(like)
        self._mixed = torch.zeros_like(like)
        self.branch: Branch | None = None
        self._last: dict[str, Any] = {}

    @torch.no_grad()
    def prepare(self, step: int) -> None:
        """Make the branch of `step`; there is none before the first release."""
        rest = 1 - at(self._share, step)
        self.branch = None
        if self._filter.count and rest:
            torch.mul(self._estimate, rest, out=self._mixed)
            self.branch = recalled(self._mixed, step)

    @torch.no_grad()
    def remember(self, release: Release) -> None:
        """Let the filter see what DP-SGD at sigma / beta would have released."""
        if not isinstance(release, Release):
            raise TypeError(f"a memory keeps releases only, not a {type(release).__name__}")
        beta = at(self._share, release.step)
        observed = release.values.clone()
        mixed = 0.0
        if self.branch is not None:
            observed.sub_(self.branch.values)
            mixed = float(self.branch.values.norm())
        stds = tuple(std / beta for std in release.stds)
        self._filter.see(observed.div_(beta), stds, self._estimate)
        norm = float(release.values.norm())
        ratio = mixed / norm if norm else 0.0
        self._last = {
            "groups": ["all"],
            "step": release.step,
            "beta": beta,
            "memory_ratio": [ratio],
        }

    def diagnostics(self) -> dict[str, Any]:
        """The last step's numbers: all of them public."""
        return dict(self._last)

    def state_dict(self) -> dict[str, Any]:
        """The filter and its estimate."""
        return {"filter": self._filter.state_dict(), "estimate": self._estimate.clone()}

    def check_state(self, state: Any, step: int) -> None:
        """Refuse a saved memory that does not fit, before anything is changed."""
        check_state("memory", state, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved memory that `check_state` has let through."""
        self._filter.load_state_dict(state["filter"])
        self._estimate.copy_(state["estimate"])
        self.branch, self._last = None, {}
