"""Uniform memory: the mean of the last releases (the FO paper's equation 24, an ablation)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vestige.memory.base import Memory, Recall, View


@dataclass(frozen=True)
class UniformMemory(Memory):
    """weights = 1 / (number of releases)."""

    window: int

    def _recall(self, view: View) -> Recall:
        lags = view.lags.size
        return Recall(np.full((view.parts, lags), 1 / max(lags, 1)), np.ones(view.parts))
