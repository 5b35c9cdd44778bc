"""What a row keeps of the memory's diagnostics: means over steps, for each group, in few numbers.

A run tells the numbers of every step. Kept are means over blocks of epochs (at most 50 blocks), and
over the whole run the mean of all groups that have a matrix: that of the SMA paper's Table 3. Steps
before the window is full, t < window - 1, are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

KEPT = ("rho", "tempering", "depth", "memory_ratio", "gate", "scale", "confidence")
_BLOCKS = 50


class _Mean:
    """The mean of what was added; None of nothing."""

    def __init__(self) -> None:
        self.total, self.count = 0.0, 0

    def add(self, value: Any) -> None:
        if isinstance(value, int | float) and math.isfinite(value):
            self.total += value
            self.count += 1

    def value(self) -> float | None:
        return float(f"{self.total / self.count:.5g}") if self.count else None


class MemoryRecord:
    """Takes the diagnostics of every epoch, and gives the means that a row keeps."""

    def __init__(self, epochs: int, window: int) -> None:
        self._per_block = max(1, -(-epochs // _BLOCKS))
        self._first = window - 1
        self._groups: list[str] = []
        self._blocks: dict[int, dict[str, list[_Mean]]] = {}
        self._steps: dict[int, int] = {}
        self._whole: dict[str, _Mean] = {}

    def add(self, epoch: int, facts: Mapping[str, Any]) -> None:
        """The numbers of all steps of an epoch, as metrics.jsonl has them."""
        self._groups = list(facts["groups"])
        block = -(-epoch // self._per_block)
        means = self._blocks.setdefault(block, {})
        steps = [i for i, step in enumerate(facts["step"]) if step >= self._first]
        self._steps[block] = self._steps.get(block, 0) + len(steps)
        for name in KEPT:
            if name not in facts:
                continue
            found = means.setdefault(name, [_Mean() for _ in self._groups])
            for i in steps:
                self._add_step(name, facts[name][i], found, self._matrices(facts, i))

    def _matrices(self, facts: Mapping[str, Any], step: int) -> Sequence[bool]:
        """Which groups have a matrix: those with an exponent, where exponents are estimated."""
        if "rho" not in facts or all(value is None for value in facts["rho"][step]):
            return [True] * len(self._groups)
        return [value is not None for value in facts["rho"][step]]

    def _add_step(
        self, name: str, values: Sequence[Any], found: list[_Mean], matrices: Sequence[bool]
    ) -> None:
        whole = self._whole.setdefault(name, _Mean())
        for value, mean, matrix in zip(values, found, matrices, strict=True):
            mean.add(value)
            if matrix:
                whole.add(value)

    def summary(self, epochs: int) -> dict[str, Any] | None:
        """What the row keeps; None for a method without memory.

        Lists by name have one entry for each block, with one number for each group; "epoch" is the
        last epoch of the block, "steps" how many steps its means are over.
        """
        if not self._blocks:
            return None
        blocks = sorted(self._blocks)
        names = [name for name in KEPT if name in self._whole]
        return {
            "groups": self._groups,
            "epoch": [min(block * self._per_block, epochs) for block in blocks],
            "steps": [self._steps[block] for block in blocks],
            **{
                name: [[mean.value() for mean in self._blocks[block][name]] for block in blocks]
                for name in names
            },
            "mean": {name: self._whole[name].value() for name in names},
        }
