"""A steady-state Kalman filter of the releases, one scalar gain for each group.

The release is seen as a slowly moving sum plus noise of known variance R (the door's). How far the
sum moves per step, Q, is estimated from the releases themselves:

    Q = max(0, mean |y_t - y_(t-1)|^2 / d - 2 R),   r = Q / R,   gain = (-r + sqrt(r^2 + 4 r)) / 2
    estimate <- estimate + gain * (y_t - estimate)

The papers name such denoising of the memory as future work; this form is ours, after Kalman 1960.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vestige.updates.filters import Filter


class KalmanFilter(Filter):
    """One gain per segment, which is a group with noise of its own."""

    def __init__(self, like: Tensor, segments: Sequence[slice]) -> None:
        super().__init__()
        self._segments = list(segments)
        self.state = {
            "estimate": torch.zeros_like(like),
            "previous": torch.zeros_like(like),
            "previous noise": torch.zeros(len(self._segments), dtype=torch.float64),
            # By group, the mean of |y_t - y_(t-1)|^2 / d - R_t - R_(t-1), which estimates Q.
            "moves": torch.zeros(len(self._segments), dtype=torch.float64),
            "powers": torch.zeros(len(self._segments), dtype=torch.float64),
        }
        self.gains = [1.0] * len(self._segments)

    def noise_powers(self, groups: int) -> list[float]:
        """P <- (1 - gain)^2 P + gain^2, group by group."""
        return [float(power) for power in self.state["powers"]]

    def _filter(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        estimate, previous = self.state["estimate"], self.state["previous"]
        noise = [std**2 for std in stds]
        for g, part in enumerate(self._segments):
            if self.count and values[part].numel():
                square = float((values[part] - previous[part]).double().square().mean())
                excess = square - noise[g] - float(self.state["previous noise"][g])
                # A mean over all steps so far: gains settle and stay.
                self.state["moves"][g] += (excess - self.state["moves"][g]) / self.count
            self.gains[g] = self._gain(float(self.state["moves"][g]), noise[g])
            estimate[part].lerp_(values[part], self.gains[g])
            self.state["powers"][g].mul_((1 - self.gains[g]) ** 2).add_(self.gains[g] ** 2)
        previous.copy_(values)
        self.state["previous noise"].copy_(torch.tensor(noise, dtype=torch.float64))
        out.copy_(estimate)

    def _gain(self, moves: float, noise: float) -> float:
        if self.count == 0 or noise == 0:
            return 1.0  # the first release is all there is; without noise every release is exact
        ratio = min(max(0.0, moves) / noise, 1e12)
        # (sqrt(r^2 + 4r) - r) / 2, written so that a large r does not cancel.
        steady = 2 * ratio / (ratio + math.sqrt(ratio * ratio + 4 * ratio)) if ratio else 0.0
        # Never below what averaging everything seen so far would use.
        return max(steady, 1 / (self.count + 1))
