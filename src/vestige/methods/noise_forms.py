"""Shapes of noise: what `vestige plan` measures, each at multiplier 1.

A form is a Toeplitz matrix, of which a column stands for all, or a tree. Papers and guarantees:
planning.py, which calibrates and compares them; factorisation.py has the matrices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vestige import methods
from vestige.plan import at

if TYPE_CHECKING:
    from vestige.privacy.factorisation import Series

BASELINE, FRACTIONAL = "dp-sgd", "fractional-noise"
INVERSE, TREE = "banded-inverse", "dp-ftrl"


@dataclass(frozen=True)
class Form:
    """A way to shape white noise at multiplier 1: the response gain / denominator(z) to one draw.

    `filters` says that the signal goes through it too, with gain / denominator(1) = 1.
    """

    method: str
    settings: dict[str, float]
    memory: int
    gain: float
    denominator: Series
    filters: bool = False

    @property
    def delay(self) -> float:
        """The steps by which a steady signal lags: the response's centre of mass."""
        if not self.filters:
            return 0.0
        lags = range(len(self.denominator))
        return -float(self.denominator @ lags) / float(self.denominator.sum())

    def response(self, steps: int) -> Series:
        """The first column of the Toeplitz matrix that makes the noise of all steps."""
        from vestige.privacy.factorisation import inverse_response

        return self.gain * inverse_response(self.denominator, steps)

    def noise(self, steps: int) -> tuple[float, float]:
        """Root mean square over the steps of the noise's prefix sums, and of the noise itself."""
        import numpy as np

        # Entry t of the column stands in the matrix steps - t times.
        times = np.arange(steps, 0, -1) / steps
        prefix, single = self._squares(steps)
        return math.sqrt(times @ prefix), math.sqrt(times @ single)

    def largest(self, steps: int) -> tuple[float, float]:
        """Both at the noisiest step: the last one, whose row of the matrix is the longest."""
        prefix, single = self._squares(steps)
        return math.sqrt(prefix.sum()), math.sqrt(single.sum())

    def _squares(self, steps: int) -> tuple[Series, Series]:
        """The squared entries of a column of the prefix sums' matrix, and of the noise's."""
        import numpy as np

        column = self.response(steps)
        return np.cumsum(column) ** 2, column**2


class _Moving(Form):
    """The response gain * denominator(z) instead: a moving sum of draws."""

    def response(self, steps: int) -> Series:
        """The weights of the draws, and then nothing."""
        import numpy as np

        kept = self.gain * self.denominator[:steps]
        return np.pad(kept, (0, steps - len(kept)))


class _Tree(Form):
    """One tree over all steps, by Honaker's estimate: its rows are no shifts of one another."""

    def noise(self, steps: int) -> tuple[float, float]:
        """From the nodes of every prefix, and from the rows of the process that draws them."""
        prefix, single, times = self._variances(steps)
        mean = float(times @ single) / steps
        return self.gain * math.sqrt(prefix.mean()), self.gain * math.sqrt(mean)

    def largest(self, steps: int) -> tuple[float, float]:
        """The prefix with the most nodes, and the row with the most."""
        prefix, single, _ = self._variances(steps)
        return self.gain * math.sqrt(prefix.max()), self.gain * math.sqrt(single.max())

    def _variances(self, steps: int) -> tuple[Series, Series, Series]:
        """Of every prefix; of a row by the height of the node that it completes; how many rows."""
        import numpy as np
        import torch

        from vestige.release.correlated import Tree

        ends = np.arange(1, steps + 1)
        heights = range(steps.bit_length())
        prefix = np.zeros(steps)
        for h in heights:
            prefix += (ends >> h & 1) / (2 - 0.5**h)
        process = Tree(torch.zeros(1), lambda _: iter(()), steps)
        single = np.array([process.marginal(2**h - 1) ** 2 for h in heights])
        return prefix, single, np.array([(steps >> h) - (steps >> h + 1) for h in heights])


def dp_sgd() -> Form:
    """White noise."""
    return replace(fractional(1.0, 1), method=BASELINE, settings={})


def fractional(order: float, bands: int) -> Form:
    """Noise |c| C^-1 Z with the first `bands` coefficients c of (1 - z)^-order; 1 band: DP-SGD."""
    from vestige.privacy.factorisation import coefficients, norm

    c = coefficients(order, bands)
    settings = {"order": order, "bands": bands}
    return Form(FRACTIONAL, settings, bands - 1, norm(c), c)


def banded_inverse(bands: int, steps: int, turns: int) -> Form:
    """Noise s D Z with D banded, its column the first coefficients of A^-1/2; one block."""
    from vestige.privacy.factorisation import inverse_root, inverse_sensitivity

    d = inverse_root(0.0, bands)
    gain = inverse_sensitivity(d, steps, turns)
    return _Moving(INVERSE, {"bands": bands}, 0, gain, d)


def tree(steps: int, period: int) -> Form:
    """The noise of one tree over all steps."""
    import numpy as np

    from vestige.privacy.factorisation import tree_sensitivity

    gain = math.sqrt(tree_sensitivity(steps, period))
    return _Tree(TREE, {}, steps.bit_length() + 1, gain, np.ones(1))


def momentum(decay: float) -> Form:
    """(1 - m) m^k: momentum with the learning rate that keeps the sum of the updates."""
    import numpy as np

    settings = {"momentum": decay}
    return Form("momentum", settings, 1, 1 - decay, np.array([1.0, -decay]), filters=True)


def memory(method: methods.FO | methods.SMA) -> Form:
    """beta / (1 - (1 - beta) sum_j a_j z^-j) with a_j like (j + 1)^(alpha - 1): FO and SMA.

    Without their gates, which follow the releases, and with an empty past at the start.
    """
    import numpy as np

    beta = at(methods.share(method, None), 0)
    weights = np.arange(2, method.window + 1) ** (method.alpha - 1.0)
    denominator = np.concatenate([[1.0], -(1 - beta) * weights / weights.sum()])
    settings = {"beta": beta, "alpha": method.alpha, "window": method.window}
    return Form(method.name, settings, method.window + 1, beta, denominator, filters=True)
