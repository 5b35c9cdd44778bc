"""Filters turn the releases, one by one, into what the optimizer gets.

Guarantee: a function of the releases alone, so it costs nothing: a run with a filter has the
epsilon of the run without.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from vestige.release.door import Release
from vestige.release.part import Gradient, Part

# DOPPLER's second order in the authors' code: a very slow low-pass.
SECOND_ORDER = ((-1.98342955, 0.98549544), (1.6332e-4, 3.2665e-4, 1.6332e-4))


class Filter(Part):
    """Keeps what it needs of the past, as named tensors in `state`, and the number of releases."""

    name, what = "filter", "filter"
    saved = ("count", "state")

    def __init__(self) -> None:
        self.count = 0
        self.state: dict[str, Tensor] = {}

    def released(self, release: Release, gradient: Gradient) -> None:
        """The filtered release takes the place of the release."""
        if gradient.withheld:
            return
        self.apply(release, gradient.values)
        gradient.values.div_(gradient.batch_size)
        powers = self.noise_powers(len(gradient.variances))
        gradient.variances = [p * v for p, v in zip(powers, gradient.variances, strict=True)]

    @torch.no_grad()
    def apply(self, release: Release, out: Tensor) -> None:
        """Write the filtered release into `out`."""
        if not isinstance(release, Release):
            raise TypeError(f"a filter takes releases only, not a {type(release).__name__}")
        self.see(release.values, release.stds, out)

    def see(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        """Write what the filter makes of a function of releases with noise of `stds` into `out`."""
        self._filter(values, stds, out)
        self.count += 1

    @abstractmethod
    def noise_powers(self, groups: int) -> list[float]:
        """How much of a release's noise variance is in the last output, in each of the groups."""

    @abstractmethod
    def _filter(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        """The filter itself; `out` is not the values' own memory."""


class RunningMean(Filter):
    """mean <- mean + gain * (release - mean), started at the first release."""

    def __init__(self, like: Tensor, gain: float) -> None:
        super().__init__()
        self._gain = gain
        self.state = {
            "mean": torch.zeros_like(like),
            "power": torch.zeros(1, dtype=torch.float64),
        }

    def noise_powers(self, groups: int) -> list[float]:
        """The same in all groups."""
        return [float(self.state["power"])] * groups

    def _filter(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        gain = self._gain if self.count else 1.0
        self.state["mean"].lerp_(values, gain)
        self.state["power"].mul_((1 - gain) ** 2).add_(gain**2)
        out.copy_(self.state["mean"])


class DopplerFilter(Filter):
    """A low-pass filter, exact for a constant gradient from the first step.

        m_t = -sum_k a_k m_(t-k) + sum_k b_k y_(t-k),     output m_t / c_t

    with feedback (a_1, a_2, ...) and taps (b_0, b_1, ...), where c_t is the same recursion on the
    unit step (1 from t = 0 on, 0 before).

    Paper: Zhang et al., DOPPLER, NeurIPS 2024, arXiv 2408.13460.
    """

    def __init__(self, like: Tensor, feedback: Sequence[float], taps: Sequence[float]) -> None:
        super().__init__()
        self._feedback, self._taps = tuple(feedback), tuple(taps)
        self.state = {f"output {k}": torch.zeros_like(like) for k in range(1, len(feedback) + 1)}
        self.state |= {f"input {k}": torch.zeros_like(like) for k in range(1, len(taps))}
        # The recursion on the unit step: past outputs, newest first. Its inputs are all 1.
        self.state["gains"] = torch.zeros(max(len(feedback), 1), dtype=torch.float64)
        # The impulse response, newest first, and the sum of its squares: what white noise becomes.
        self.state["response"] = torch.zeros(max(len(feedback), 1), dtype=torch.float64)
        self.state["energy"] = torch.zeros(1, dtype=torch.float64)

    def _filter(self, values: Tensor, stds: Sequence[float], out: Tensor) -> None:
        torch.mul(values, self._taps[0], out=out)
        for k, tap in enumerate(self._taps[1:], start=1):
            out.add_(self.state[f"input {k}"], alpha=tap)
        for k, back in enumerate(self._feedback, start=1):
            out.add_(self.state[f"output {k}"], alpha=-back)
        self._shift("output", len(self._feedback), out)
        self._shift("input", len(self._taps) - 1, values)
        self._respond()
        out.div_(self._gain())

    def noise_powers(self, groups: int) -> list[float]:
        """The energy of the response so far over the squared gain; the same in all groups."""
        gain = float(self.state["gains"][0])
        return [float(self.state["energy"]) / gain**2] * groups

    def _respond(self) -> None:
        past = self.state["response"]
        value = self._taps[self.count] if self.count < len(self._taps) else 0.0
        value -= sum(a * float(h) for a, h in zip(self._feedback, past, strict=False))
        self.state["response"] = torch.cat([past.new_tensor([value]), past[:-1]])
        self.state["energy"] += value**2

    def _gain(self) -> float:
        gains = self.state["gains"]
        gain = sum(self._taps[: self.count + 1])
        gain -= sum(a * float(g) for a, g in zip(self._feedback, gains, strict=False))
        self.state["gains"] = torch.cat([gains.new_tensor([gain]), gains[:-1]])
        return gain

    def _shift(self, name: str, depth: int, newest: Tensor) -> None:
        for k in range(depth, 1, -1):
            self.state[f"{name} {k}"].copy_(self.state[f"{name} {k - 1}"])
        if depth:
            self.state[f"{name} 1"].copy_(newest)


class KalmanFilter(Filter):
    """A steady-state Kalman filter of the releases, one scalar gain for each segment.

    The release is seen as a slowly moving sum plus noise of known variance R (the door's). How far
    the sum moves per step, Q, is estimated from the releases themselves:

        Q = max(0, mean |y_t - y_(t-1)|^2 / d - 2 R),  r = Q / R,  gain = (-r + sqrt(r^2 + 4 r)) / 2
        estimate <- estimate + gain * (y_t - estimate)

    The papers name such denoising of the memory as future work; this form is ours, after Kalman
    1960.
    """

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
