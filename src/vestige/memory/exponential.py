"""Exponential memory: weights fall by a fixed factor (the FO paper's equation 26, an ablation)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vestige.memory.base import Memory, Recall, View


@dataclass(frozen=True)
class ExponentialMemory(Memory):
    """weights proportional to decay^(j-1)."""

    window: int
    decay: float

    def _recall(self, view: View) -> Recall:
        raw = self.decay ** (view.lags - 1)
        weights = raw / max(raw.sum(), 1.0)  # the first weight is 1: the sum is 0 only when empty
        return Recall(np.tile(weights, (view.parts, 1)), np.ones(view.parts))
