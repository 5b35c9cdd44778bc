"""What a row keeps of the memory's diagnostics: means over steps, for each group, in few numbers.

A run tells the numbers of every step. Kept are means over blocks of epochs (at most 50 blocks), and
over the whole run the mean of all groups that have a matrix: that of the SMA paper's Table 3. Steps
before the window is full, t < window - 1, are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

KEPT = ("rho", "tempering", "depth", "memory_ratio", "gate", "scale", "confidence")
_BLOCKS = 50

Array = npt.NDArray[np.float64]  # one line for each step, one column for each group


class MemoryRecord:
    """Takes the diagnostics of every epoch, and gives the means that a row keeps."""

    def __init__(self, epochs: int, window: int) -> None:
        self._per_block = max(1, -(-epochs // _BLOCKS))
        self._first = window - 1
        self._groups: list[str] = []
        self._blocks: dict[int, dict[str, Array]] = {}

    def add(self, epoch: int, facts: Mapping[str, Any]) -> None:
        """The numbers of all steps of an epoch, as metrics.jsonl has them."""
        self._groups = list(facts["groups"])
        kept = np.asarray(facts["step"]) >= self._first
        block = self._blocks.setdefault(-(-epoch // self._per_block), {})
        for name in KEPT:
            if name in facts:
                added = np.array(facts[name], dtype=float)[kept]
                block[name] = np.concatenate([block[name], added]) if name in block else added

    def summary(self, epochs: int) -> dict[str, Any] | None:
        """What the row keeps; None for a method without memory.

        Lists by name have one entry for each block, with one number for each group; "epoch" is the
        last epoch of the block, "steps" how many steps its means are over.
        """
        if not self._blocks:
            return None
        blocks = [self._blocks[number] for number in sorted(self._blocks)]
        names = list(blocks[0])
        whole = {name: np.concatenate([block[name] for block in blocks]) for name in names}
        matrices = _matrices(whole)
        return {
            "groups": self._groups,
            "epoch": [min(number * self._per_block, epochs) for number in sorted(self._blocks)],
            "steps": [len(next(iter(block.values()))) for block in blocks],
            **{name: [_group_means(block[name]) for block in blocks] for name in names},
            "mean": {name: _mean(values[matrices]) for name, values in whole.items()},
        }


def _matrices(values: Mapping[str, Array]) -> npt.NDArray[np.bool_]:
    """Which groups have a matrix: those with an exponent, at steps where any has one."""
    known = np.isfinite(values.get("rho", next(iter(values.values()))))
    return known | ~known.any(axis=1, keepdims=True) if "rho" in values else np.ones_like(known)


def _group_means(values: Array) -> list[float | None]:
    return [_mean(group) for group in values.T]


def _mean(values: Array) -> float | None:
    """The mean of the finite ones, to five digits; None of nothing."""
    finite = values[np.isfinite(values)]
    return float(f"{finite.mean():.5g}") if finite.size else None
