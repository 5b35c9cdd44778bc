"""What the inner products of releases would be if the releases were noise alone.

A release's noise is fresh noise plus what its branch inherited,  N_t = Z_t + sum_j c_j N_(t-j),
with the branch's coefficients c_j. So the expected products E<N_a, N_b> follow, step by step, from
the coefficients and the door's standard deviations, and can be taken off the products of the
releases. The coefficients are treated as constants, though they depend a little on earlier noise.

Guarantee: public numbers only.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from vestige.memory.base import Array, View


class NoiseGram:
    """The expected products of the noise, by lag, newest first, and those with the trend."""

    def __init__(self, parts: int, rows: int, ema: float) -> None:
        self._ema = ema
        self._gram = np.zeros((parts, rows, rows))
        self._trend = np.zeros((parts, rows))
        self._trend_square = np.zeros(parts)
        self._count = 0

    def append(self, coefficients: Array, power: Array) -> None:
        """A release with these branch coefficients (part, lag) and expected |Z|^2 (part)."""
        n = coefficients.shape[1]
        inherited = np.einsum("gj,gjb->gb", coefficients, self._gram[:, :n, :])
        square = power + np.einsum("gj,gj->g", inherited[:, :n], coefficients)
        with_trend = np.einsum("gj,gj->g", coefficients, self._trend[:, :n])
        along = np.concatenate([square[:, None], inherited[:, :-1]], axis=1)
        ema = self._ema if self._count else 1.0
        self._gram[:, 1:, 1:] = self._gram[:, :-1, :-1]
        self._gram[:, 0, :] = self._gram[:, :, 0] = along
        self._trend[:, 1:] = self._trend[:, :-1]
        self._trend[:, 0] = with_trend
        self._trend = (1 - ema) * self._trend + ema * along
        self._trend_square = (
            ema**2 * square + 2 * ema * (1 - ema) * with_trend + (1 - ema) ** 2 * self._trend_square
        )
        self._count += 1

    def restart(self) -> None:
        """Forget everything, as the history does."""
        for array in (self._gram, self._trend, self._trend_square):
            array[:] = 0
        self._count = 0

    def taken_off(self, view: View) -> View:
        """The view of the releases without their noise."""
        n = view.trend.shape[1]
        return View(
            view.step,
            view.gram - self._gram[:, :n, :n],
            view.trend - self._trend[:, :n],
            np.maximum(view.trend_square - self._trend_square, 0),
            view.exponents,
        )

    def state_dict(self) -> dict[str, Any]:
        """As plain lists."""
        return {
            "gram": self._gram.tolist(),
            "trend": self._trend.tolist(),
            "trend_square": self._trend_square.tolist(),
            "count": self._count,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a saved state."""
        self._gram = np.array(state["gram"])
        self._trend = np.array(state["trend"])
        self._trend_square = np.array(state["trend_square"])
        self._count = int(state["count"])
