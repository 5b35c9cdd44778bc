"""What the inner products of releases would be if the releases were noise alone.

A release's noise is fresh noise plus what its branch inherited,  N_t = Z_t + sum_j c_j N_(t-j),
with the branch's coefficients c_j. So the expected products E<N_a, N_b> follow, step by step, from
the coefficients and the door's standard deviations, and can be taken off the products of the
releases. The coefficients are treated as constants, though they depend a little on earlier noise.

Guarantee: public numbers only.
"""

from __future__ import annotations

import numpy as np

from vestige.memory.base import Array, View
from vestige.memory.products import Products


class NoiseGram(Products):
    """The expected products of the noise of the last releases, and of their trend."""

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
