"""The power-law exponents of each group's weights, estimated again every `refresh` steps."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.gradients.groups import Groups
from vestige.memory import spectrum


class WeightSpectra:
    """Reads the exponents of the groups: the mean over a group's matrices, None without one.

    Guarantee: a function of the weights, which are public (post-processing of the releases). They
    are estimated at step 1 and then whenever (step - 1) % refresh = 0.
    """

    def __init__(self, groups: Groups, estimator: str, refresh: int) -> None:
        self._matrices = [(s.group, s.parameter) for s in groups.slots if s.parameter.ndim >= 2]
        self._estimator, self._refresh = estimator, refresh
        self._seen: tuple[object, ...] = ()
        self.exponents: tuple[float | None, ...] = (None,) * groups.count

    def due(self, step: int) -> bool:
        """Whether step `step` has exponents of its own."""
        return step >= 1 and (step - 1) % self._refresh == 0

    def changed(self) -> bool:
        """Whether somebody changed the weights since they were read."""
        return self._seen != self._fingerprint()

    @torch.no_grad()
    def read(self) -> None:
        """Estimate the exponents from the weights as they are now."""
        found: list[list[float]] = [[] for _ in self.exponents]
        each = spectrum.exponents([p for _, p in self._matrices], self._estimator)
        for (group, _), rho in zip(self._matrices, each, strict=True):
            if rho is not None:
                found[group].append(rho)
        self.exponents = tuple(math.fsum(r) / len(r) if r else None for r in found)
        self._seen = self._fingerprint()

    def check_state(self, exponents: Any) -> None:
        """Refuse saved exponents that are not one number or None for each group."""
        fits = isinstance(exponents, list) and len(exponents) == len(self.exponents)
        if not fits or not all(rho is None or is_number(rho) for rho in exponents):
            raise ConfigError(
                f"the saved memory has no exponent for each of {len(self.exponents)} groups: it "
                "was written by a run with another clipping, or was damaged."
            )

    def restore(self, exponents: Sequence[float | None]) -> None:
        """Take over saved exponents. The weights count as changed."""
        self.exponents, self._seen = tuple(exponents), ()

    def _fingerprint(self) -> tuple[object, ...]:
        # Writing through .data changes neither the version nor the address: only the norm tells.
        weights: list[Tensor] = [p.detach() for _, p in self._matrices]
        if not weights:
            return ()
        norms = torch.stack(torch._foreach_norm(weights)).tolist()
        return (*((p._version, p.data_ptr()) for p in weights), *norms)
