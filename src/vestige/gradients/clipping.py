"""Clip bounds: what they are for each group, and the factor each example is scaled by.

Guarantee: with the factors of `Clip`, one example moves group g's sum by at most bounds[g], and the
whole sum by at most `sensitivity` = sqrt(sum_g bounds[g]^2), in l2 norm, when it is added to or
removed from the data. Paper: Abadi et al. 2016, arXiv 1607.00133.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from vestige.errors import ConfigError
from vestige.gradients.clip_forms import Auto, Clipping, Quantile, taken_apart

__all__ = ["Auto", "Clip", "Clipping", "Quantile", "taken_apart"]

# Gradients that would have to be stretched further stay shorter than the bound. A row's output
# gradient is at most 1.8e19 (see gradients/uses.py), and its product with a factor must be finite.
_LONGEST_STRETCH = 1e18


@dataclass(frozen=True)
class Clip:
    """The l2 bound of a step for each group; with a `stability`, examples are normalised to it."""

    bounds: tuple[float, ...]
    stability: float | None = None

    @classmethod
    def over(
        cls, max_grad_norm: Any, group_names: Sequence[str], stability: float | None = None
    ) -> Clip:
        """One number C is split C/sqrt(G), so that the joint sensitivity is C; or one per group."""
        count = len(group_names)
        if isinstance(max_grad_norm, int | float) or getattr(max_grad_norm, "ndim", None) == 0:
            max_grad_norm = float(max_grad_norm)  # also a zero-dimensional tensor or array
            _check_bound(max_grad_norm)
            return cls((max_grad_norm / math.sqrt(count),) * count, stability)
        bounds = tuple(float(c) for c in max_grad_norm)
        if len(bounds) != count:
            raise ConfigError(
                f"max_grad_norm has {len(bounds)} values for {count} groups. A group is a layer "
                "with its weight and bias, not a parameter; in order they are: "
                f"{', '.join(group_names)}."
            )
        for bound in bounds:
            _check_bound(bound)
        return cls(bounds, stability)

    @property
    def sensitivity(self) -> float:
        """How far one added or removed example moves the whole clipped sum, in l2 norm."""
        return math.sqrt(sum(c * c for c in self.bounds))

    def factors(
        self, square_norms: Tensor, group: int, scale: float, dtype: torch.dtype, rounding: float
    ) -> Tensor:
        """The weight of each example's gradient in the group's sum.

        `square_norms` are those of the gradients that autograd gave, which `scale` turns into the
        gradients of the examples' own losses (the row count under a mean). They must not exceed
        `most_square`. `rounding` is the relative error of the sum's arithmetic.
        """
        # scale * min(1, C / (scale * norm)); a norm of zero gives infinity before the clamp. The
        # rounding is taken off, so that a sum that rounds up stays within the bound.
        bound = self.bounds[group] * (1 - rounding)
        if self.stability is not None:
            # scale * C / (scale * norm + stability); nothing where there is no gradient.
            factors = bound / square_norms.sqrt().add_(self.stability / scale)
            factors.clamp_(max=_LONGEST_STRETCH).masked_fill_(square_norms == 0, 0)
            return factors.to(dtype)
        return square_norms.rsqrt().mul_(bound).clamp_(max=scale).to(dtype)

    def most_square(self, group: int, dtype: torch.dtype) -> float:
        """The largest squared norm whose factor `dtype` holds exactly (a denormal could round up):
        an example beyond it drops out, like one that is not finite."""
        norm = min(self.bounds[group] / torch.finfo(dtype).tiny / 2, 1e150)
        return norm * norm


def _check_bound(bound: float) -> None:
    if not (math.isfinite(bound) and bound > 0):
        raise ConfigError(
            f"max_grad_norm={bound} must be a positive finite number: it bounds what one example "
            "can contribute; 1.0 is a common start."
        )
