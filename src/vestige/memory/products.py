"""Inner products of a run's last vectors and of their trend, by lag, newest first.

The trend is mu_0 = v_0, mu_t = ema * v_t + (1 - ema) * mu_(t-1); its own products follow from those
of the vectors. The history keeps the products of releases, the noise Gram those of their noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vestige.memory.base import Array, View


class Products:
    """`gram[g, i, j]` and `trend[g, j]` for each part g and lag, and `trend_square[g]`."""

    def __init__(self, parts: int, rows: int, ema: float) -> None:
        self._ema = ema
        self.gram = np.zeros((parts, rows, rows))
        self.trend = np.zeros((parts, rows))
        self.trend_square = np.zeros(parts)
        self.started = False

    @property
    def ema(self) -> float:
        """The weight of the next vector in the trend: 1 for the first."""
        return self._ema if self.started else 1.0

    def append(self, along: Array, with_trend: Array) -> None:
        """A new vector: its products with itself and the vectors before it, and with the trend."""
        ema = self.ema
        self.gram[:, 1:, 1:] = self.gram[:, :-1, :-1]
        self.gram[:, 0, :] = self.gram[:, :, 0] = along
        self.trend[:, 1:] = self.trend[:, :-1]
        self.trend[:, 0] = with_trend
        self.trend = (1 - ema) * self.trend + ema * along
        self.trend_square = (
            ema**2 * along[:, 0]
            + 2 * ema * (1 - ema) * with_trend
            + (1 - ema) ** 2 * self.trend_square
        )
        self.started = True

    def restart(self) -> None:
        """Forget everything."""
        for array in self._arrays():
            array[:] = 0
        self.started = False

    def view(self, step: int, depth: int, exponents: Sequence[float | None] = ()) -> View:
        """Copies of the products over the first `depth` lags."""
        return View(
            step,
            self.gram[:, :depth, :depth].copy(),
            self.trend[:, :depth].copy(),
            self.trend_square.copy(),
            tuple(exponents),
        )

    def _arrays(self) -> Iterator[Array]:
        yield from (self.gram, self.trend, self.trend_square)

    def state_dict(self) -> dict[str, Any]:
        """As plain lists and a bool."""
        gram, trend, square = (array.tolist() for array in self._arrays())
        return {"gram": gram, "trend": trend, "trend_square": square, "started": self.started}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state that `check_state` has let through."""
        self.gram = np.array(state["gram"], dtype=float)
        self.trend = np.array(state["trend"], dtype=float)
        self.trend_square = np.array(state["trend_square"], dtype=float)
        self.started = state["started"]
