"""Inner products of a run's last vectors and of their trend, by lag, newest first.

The trend is mu_0 = v_0, mu_t = ema * v_t + (1 - ema) * mu_(t-1); its own products follow from those
of the vectors. The history keeps the products of releases, the noise Gram those of their noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vestige.memory.rules import Array, View


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


class NoiseGram(Products):
    """What the inner products of releases would be if the releases were noise alone.

    A release's noise is fresh noise plus what its branch inherited, N_t = Z_t + sum_j c_j N_(t-j),
    with the branch's coefficients c_j. So the expected products E<N_a, N_b> follow, step by step,
    from the coefficients and the door's standard deviations, and can be taken off the products of
    the releases. The coefficients are treated as constants, though they depend a little on earlier
    noise.

    Guarantee: public numbers only.
    """

    def inherit(self, coefficients: Array, power: Array) -> None:
        """A release with these branch coefficients (part, lag) and expected |Z|^2 (part)."""
        n = coefficients.shape[1]
        inherited = np.einsum("gj,gjb->gb", coefficients, self.gram[:, :n, :])
        square = power + (inherited[:, :n] * coefficients).sum(1)
        with_trend = (coefficients * self.trend[:, :n]).sum(1)
        self.append(np.concatenate([square[:, None], inherited[:, :-1]], axis=1), with_trend)

    def taken_off(self, view: View) -> View:
        """The view of the releases without their noise."""
        n = view.trend.shape[1]
        return View(
            view.step,
            view.gram - self.gram[:, :n, :n],
            view.trend - self.trend[:, :n],
            np.maximum(view.trend_square - self.trend_square, 0),
            view.exponents,
        )
