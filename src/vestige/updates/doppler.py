"""DOPPLER: a low-pass filter of the releases, exact for a constant gradient from the first step.

    m_t = -sum_k a_k m_(t-k) + sum_k b_k y_(t-k),     output m_t / c_t

where c_t is the same recursion on the unit step (1 from t = 0 on, 0 before).

Paper: Zhang et al., DOPPLER, NeurIPS 2024, arXiv 2408.13460.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from vestige.updates.filters import Filter

# The second order of the authors' code: a very slow low-pass.
SECOND_ORDER = ((-1.98342955, 0.98549544), (1.6332e-4, 3.2665e-4, 1.6332e-4))


class DopplerFilter(Filter):
    """The recursion with feedback (a_1, a_2, ...) and taps (b_0, b_1, ...)."""

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
