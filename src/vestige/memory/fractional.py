"""Fractional memory tempered by the trend of the releases (FO-DP-SGD, equations 4 to 9).

    nu_j    = |s~_(t-j) - mu| / (max(|mu|, min_scale) + eps)       inconsistency
    chi     = |mu| / (|mu| + confidence)
    a_j     = (j+1)^(alpha-1) * exp(-(tempering + chi * inconsistency * nu_j) * j),   normalised

Paper: FO-DP-SGD, arXiv 2605.09890; lambda = tempering, tau = inconsistency, gamma = ema,
kappa = min_scale, zeta = confidence.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from vestige.memory.base import Memory, Recall, View, power_law


@dataclass(frozen=True, kw_only=True)
class FractionalMemory(Memory):
    """The FO paper's rule, over the whole release."""

    window: int
    alpha: float
    tempering: float
    inconsistency: float
    ema: float
    min_scale: float
    confidence: float
    eps: float

    def _recall(self, view: View) -> Recall:
        norm = np.sqrt(np.maximum(view.trend_square, 0))
        squares = np.diagonal(view.gram, axis1=1, axis2=2)
        gaps = squares - 2 * view.trend + view.trend_square[:, None]
        scores = (
            np.sqrt(np.maximum(gaps, 0)) / (np.maximum(norm, self.min_scale) + self.eps)[:, None]
        )
        chi = norm / (norm + self.confidence)
        tempering = self.tempering + chi[:, None] * self.inconsistency * scores
        return Recall(
            power_law(view.lags, self.alpha, tempering),
            np.ones(view.parts),
            {"inconsistency": scores, "confidence": chi},
        )
