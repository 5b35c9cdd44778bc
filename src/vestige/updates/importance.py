"""Importance sampling: examples enter a lot in proportion to their clipped gradient norms.

    once a period   K~ = sum_i n_i + N(0, (norm_noise C)^2) over all records, n_i = min(|g_i|, C)
    every step      a superset at rate b C / K~; record i of it is accepted with probability n_i / C
                    and contributes C g_i / |g_i|; the release is multiplied by K~ / (b N C)

So record i is in a lot with probability b n_i / K~ and the update is unbiased. K~ is kept within
[floor, 1] * N C: the rate never exceeds b / (floor N), which is public before the run.

Paper: DPIS, Wei et al. 2022, arXiv 2210.09634; the floor is ours.
Guarantee: K~ is a Gaussian release with sensitivity C and no sampling, charged at (1, norm_noise).
A step's contribution has norm C and inclusion probability at most b / (floor N), whatever the
record, so it is charged as a Gaussian subsampled at that rate. The size of the superset is private.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

from vestige.errors import ConfigError
from vestige.gradients.clipping import Clip
from vestige.release.door import Release
from vestige.release.part import Gradient, Part
from vestige.sampling.lots import draw_lot
from vestige.sampling.streams import ACCEPT, Randomness


class Importance(Part):
    """The normaliser K~ in units of N C, and the acceptance of the records of a superset."""

    name, what = "importance", "normaliser"
    saved = ("mean_norm",)

    def __init__(
        self,
        randomness: Randomness,
        records: int,
        dataset_size: int,
        cap: float,
        floor: float,
        norm_noise: float,
    ) -> None:
        self._randomness, self._records = randomness, records
        self._size, self._cap = dataset_size, cap
        self._floor, self.norm_noise = floor, norm_noise
        self.mean_norm = 1.0  # K~ / (N C): what releases are multiplied by
        self.measuring = False
        self._norms = 0.0  # private: the sum of the clipped norms seen in this pass, over C
        self._lot, self._decided = 0, 0

    @property
    def rate(self) -> float:
        """The rate of the superset: b C / K~, at most the cap that lots are charged at."""
        return min(self._cap * self._floor / self.mean_norm, self._cap)

    def lot(self, number: int) -> npt.NDArray[Any]:
        """The superset of lot `number`, drawn when it is asked for."""
        return draw_lot(self._randomness, number, self._records, self.rate)

    def released(self, release: Release, gradient: Gradient) -> None:
        """Undo the scaling of examples to the bound: multiply by K~ / (N C)."""
        gradient.values.mul_(self.mean_norm)
        gradient.variances = [self.mean_norm**2 * v for v in gradient.variances]

    def begin(self, lot: int, measuring: bool) -> None:
        """A lot is handed out: the data for the normaliser, or a superset."""
        self._lot, self._decided = lot, 0
        self.measuring, self._norms = measuring, 0.0

    def note(self, lengths: Tensor) -> None:
        """Add clipped norms, in units of C, to the normaliser."""
        self._norms += float(lengths.sum())

    def accept(self, lengths: Tensor) -> Tensor:
        """Which of the next records of the lot are in; `lengths` are clipped norms over C."""
        first, self._decided = self._decided, self._decided + len(lengths)
        rank, world = (
            self._randomness.share
        )  # row j of this rank is row rank + j * world of the lot
        drawn = self._randomness.uniforms(ACCEPT, self._lot, self._decided * world)
        drawn = drawn[rank + first * world :: world].copy()
        return (torch.from_numpy(drawn).to(lengths.device) <= lengths) & (lengths > 0)

    def settle(self, noisy: float) -> None:
        """The normaliser was released, in units of C."""
        self.mean_norm = min(max(noisy / self._size, self._floor), 1.0)
        self.measuring = False

    def take_norms(self) -> float:
        """The private sum for the door, which is forgotten here."""
        total, self._norms = self._norms, 0.0
        return total

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse a saved normaliser that is out of range."""
        super().check_state(state, releases)
        if not self._floor <= state["mean_norm"] <= 1:
            raise ConfigError(
                f"the saved normaliser {state['mean_norm']!r} is not within [{self._floor}, 1]: it "
                "was written by a run with another floor, or was damaged."
            )


@dataclass(frozen=True)
class ImportanceClip(Clip):
    """Every accepted example is scaled to the bound, every other one contributes nothing."""

    importance: Importance = field(kw_only=True)

    def factors(
        self, square_norms: Tensor, group: int, scale: float, dtype: torch.dtype, rounding: float
    ) -> Tensor:
        """The weight of each example's gradient: C / |g| for the accepted ones, 0 for the rest."""
        bound, norms = self.bounds[group], square_norms.sqrt()
        lengths = (norms * scale / bound).clamp_(max=1)
        if self.importance.measuring:
            self.importance.note(lengths)
            return torch.zeros_like(lengths, dtype=dtype)
        accepted = self.importance.accept(lengths)
        factors = (bound * (1 - rounding) / norms).masked_fill_(~accepted, 0)
        return factors.clamp_(max=1e18).to(dtype)
