"""A geometry: what each example contributes to a release of a direction and a length.

    release = (sum of direction parts, sum of lengths) + noise,
    |direction part| <= bounds[0],   length m_i = min(|g_i|, C) <= bounds[1] = C

A reference direction, public because it was decoded from the previous release (the first from a
seed), says what a direction part is. Duan et al. 2025, arXiv 2504.05618, give the idea of noise on
direction and length apart; the bounds are ours, because theirs does not hold (see published.py).

Guarantee: given the earlier releases, one example moves each segment's sum by at most its bound,
whatever its gradient. With noise multipliers a and m on the two segments a release costs what one
Gaussian release with multiplier (a^-2 + m^-2)^(-1/2) costs.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from vestige.checks import check_state, is_number, is_whole
from vestige.errors import ConfigError

_BLOCK = 2**20  # numbers of a block of rows: float64 temporaries stay at 8 MiB each


class Geometry(ABC):
    """Turns per-example gradients into bounded parts, and a release of their sum into a gradient.

    `like` is a flat tensor as long as a gradient; it gives device and precision. `seed` is public.
    """

    size: int  # of a release: the direction's coordinates, then the length

    def __init__(self, like: Tensor, size: int, seed: int) -> None:
        if like.ndim != 1 or like.numel() < 2 or not like.is_floating_point():
            raise ConfigError(
                f"a gradient of shape {tuple(like.shape)} and {like.dtype} has no direction to "
                "release: pass a flat floating point tensor with at least two numbers."
            )
        if not is_whole(seed):
            raise ConfigError(f"seed={seed!r} must be an integer: it makes the first reference.")
        self.length = like.numel()  # P, of a gradient
        self.size = size
        self._dtype = torch.promote_types(like.dtype, torch.float32)
        # Hashed, so that nobody who seeds a generator with the same number draws this direction.
        hashed = hashlib.sha256(f"vestige reference direction {seed}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(hashed[:7]))
        first = torch.randn(self.length, generator=generator, dtype=torch.float64)
        self._reference = self._remembered((first / first.norm()).to(like.device))

    @property
    def segments(self) -> list[slice]:
        """The parts of a release with noise of their own: the direction, then the length."""
        return [slice(0, self.size - 1), slice(self.size - 1, self.size)]

    def bounds(self, clip: float) -> tuple[float, ...]:
        """The l2 bound of one example's part in each segment."""
        _check_clip(clip)
        return (self._direction_bound(), float(clip))

    @abstractmethod
    def _direction_bound(self) -> float:
        """The l2 bound of one example's direction part."""

    @abstractmethod
    def _directions(self, rows: Tensor, shares: Tensor) -> Tensor:
        """The sum of the rows' direction parts, in float64.

        Rows have a largest entry of 1, or are zero and contribute nothing; shares are m_i / C.
        """

    @abstractmethod
    def _direction(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """The unit vector that a noisy mean of direction parts stands for, and the next reference.

        A function of its argument and the reference: post-processing of a release.
        """

    @abstractmethod
    def _remembered(self, unit: Tensor) -> Tensor:
        """A unit vector in the form in which references are kept."""

    @torch.no_grad()
    def contribution(self, gradients: Tensor, lengths: Tensor, clip: float) -> Tensor:
        """The sum over the rows of what each example contributes: private until noise is added.

        `gradients` are (n, P), one example in each row, `lengths` (n,) their clipped lengths. Rows
        of zeros, of length zero or with a non-finite number have no direction part.
        """
        _check_clip(clip)
        if gradients.ndim != 2 or gradients.shape[1] != self.length:
            raise ConfigError(
                f"gradients of shape {tuple(gradients.shape)} do not fit: give one flat gradient "
                f"of {self.length} numbers in each row."
            )
        if lengths.shape != gradients.shape[:1]:
            raise ConfigError(
                f"lengths of shape {tuple(lengths.shape)} for {gradients.shape[0]} gradients: "
                "give one clipped length for each row."
            )
        # Clamped again, so that the bound does not hang on the caller.
        lengths = lengths.double().nan_to_num(0.0, posinf=0.0).clamp(0.0, clip)
        total = torch.zeros(self.size, dtype=torch.float64, device=gradients.device)
        rows_at_once = max(1, _BLOCK // self.length)
        for start in range(0, gradients.shape[0], rows_at_once):
            block = slice(start, start + rows_at_once)
            rows = gradients[block].double()
            largest = rows.abs().amax(dim=1)
            counts = largest.isfinite() & (largest > 0) & (lengths[block] > 0)
            rows = rows.div(largest.where(counts, 1.0)[:, None])
            rows.masked_fill_(~counts[:, None], 0.0)  # 0 * inf would be NaN
            total[:-1] += self._directions(rows, lengths[block] / clip)
        total[-1] = lengths.sum()
        # The last rounding may round up: taken off before, so that a part stays within its bound.
        return total.mul_(1 - 2 * torch.finfo(self._dtype).eps).to(self._dtype)

    @torch.no_grad()
    def gradient(self, values: Tensor, lot: int) -> Tensor:
        """The mean gradient that a release stands for; its direction is the next reference.

        `values` is a release, noise included, so all of this is public and free; `lot` is the
        public (expected) number of examples in it.
        """
        if not isinstance(values, Tensor):
            raise TypeError(f"a release's values are a tensor, not a {type(values).__name__}")
        if values.shape != (self.size,):
            raise ConfigError(
                f"values of shape {tuple(values.shape)} are no release of this geometry: it has "
                f"{self.size} numbers."
            )
        if not is_whole(lot) or lot < 1:
            raise ConfigError(f"lot={lot!r} must be a whole number of at least 1 example.")
        mean = values.double() / lot
        direction, self._reference = self._direction(mean[:-1])
        # A length cannot be negative, and a zero one still has a direction to remember.
        return direction.mul_(mean[-1].clamp(min=0.0)).to(self._dtype)

    def state_dict(self) -> dict[str, Any]:
        """The reference. It is public."""
        return {"reference": self._reference.clone()}

    def check_state(self, state: Any) -> None:
        """Refuse a saved reference that does not fit, before anything is changed."""
        check_state("reference direction", state, self.state_dict(), finite_entries=True)
        if not self._fits(state["reference"]):
            raise ConfigError(
                "the saved reference direction does not fit: it was written by a run with another "
                "model or method, or was damaged."
            )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved reference that `check_state` has let through."""
        self._reference.copy_(state["reference"])

    def _fits(self, reference: Tensor) -> bool:
        """Whether finite numbers of the right shape can be a reference."""
        return True


def _check_clip(clip: float) -> None:
    if not is_number(clip) or clip <= 0:
        raise ConfigError(
            f"clip={clip!r} must be a positive finite number: it bounds the length of one "
            "example's gradient."
        )
