"""Clip bounds: their forms as public settings, and the factor each example is scaled by.

Guarantee: with the factors of `Clip`, one example moves group g's sum by at most bounds[g], and the
whole sum by at most `sensitivity` = sqrt(sum_g bounds[g]^2), in l2 norm, when it is added to or
removed from the data. Paper: Abadi et al. 2016, arXiv 1607.00133.

Importing this module imports no torch: settings are checked before anything slow begins.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

from vestige.checks import is_number
from vestige.errors import ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from vestige.gradients.groups import Partition

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
        try:
            bounds = tuple(float(c) for c in max_grad_norm)
        except (TypeError, ValueError):
            bounds = ()
        if not bounds or isinstance(max_grad_norm, str):
            raise ConfigError(
                f"max_grad_norm={max_grad_norm!r} must be a positive number, which bounds what one "
                "example can change, or one such number for each clipping group: 1.0 is usual."
            )
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
        import torch

        norm = min(self.bounds[group] / torch.finfo(dtype).tiny / 2, 1e150)
        return norm * norm


def _check_bound(bound: float) -> None:
    if not (math.isfinite(bound) and bound > 0):
        raise ConfigError(
            f"max_grad_norm={bound} must be a positive finite number: it bounds what one example "
            "can contribute; 1.0 is a common start."
        )


# -- forms of clipping beyond a fixed bound ----------------------------------------------------


@dataclass(frozen=True)
class Auto:
    """Automatic clipping: every example contributes C g / (|g| + stability), whatever its norm.

    `clipping="auto"` is AUTO-S over all parameters (stability 0.01), `"auto_per_layer"` the same in
    each layer; stability 0 is AUTO-V. The bound C becomes a factor of the learning rate.

    Guarantee: a contribution is shorter than C, so sensitivity and cost are those of clipping at C.
    Paper: Bu et al. 2023, arXiv 2206.07136.
    """

    groups: Partition = "flat"
    stability: float = 0.01

    def __post_init__(self) -> None:
        if not is_number(self.stability) or self.stability < 0:
            raise ConfigError(
                f"stability={self.stability!r} must be a finite number of at least 0: 0.01 is "
                "AUTO-S, 0 is AUTO-V."
            )

    def __str__(self) -> str:
        name = self.groups if isinstance(self.groups, str) else "partition"
        return f"auto, {name}, stability {self.stability!r}"


@dataclass(frozen=True)
class Quantile:
    """Clipping at a quantile of the gradients' norms, followed by a noisy count of the unclipped.

        count = sum_i b_i + N(0, count_noise^2),   f = count / L + 1/2 in [0, 1]
        b_i = 1/2 where 0 < |g_i| <= C_t,  -1/2 beyond (also where it is not finite),  0 at g_i = 0
        C_(t+1) = C_t exp(-rate (f - target)),   kept within [lowest, highest]

    `max_grad_norm` is C_0, or the C_0 of each group; the noise of a step is in units of its C_t.
    `count_noise` None is L/20. `clipping="quantile"` is flat, `"quantile_per_layer"` has a bound
    for each layer.

    Guarantee: one record moves a centred count by 1/2, the counts of G groups by sqrt(G)/2, whether
    it is added, removed, or zeroed out (its gradient becomes zero while its place stays). They are
    released with the sum and charged with it: 1/z^2 = (beta/sigma)^2 + G/(2 count_noise)^2.
    Paper: Andrew et al. 2021, arXiv 1905.03871.
    """

    groups: Partition = "flat"
    target: float = 0.5
    rate: float = 0.2
    count_noise: float | None = None
    lowest: float = 1e-6
    highest: float = 1e6

    def __post_init__(self) -> None:
        if not is_number(self.target) or not 0 < self.target < 1:
            raise ConfigError(
                f"target={self.target!r} must be strictly between 0 and 1: the fraction of "
                "examples that stay unclipped."
            )
        if not is_number(self.rate) or not 0 < self.rate <= 10:
            raise ConfigError(f"rate={self.rate!r} must be above 0 and at most 10; 0.2 is usual.")
        noise = self.count_noise
        if noise is not None and (not is_number(noise) or noise < 0):
            raise ConfigError(
                f"count_noise={noise!r} must be zero or a positive finite number (0 switches "
                "privacy off, for tests), or None for a twentieth of the lot."
            )
        numbers = is_number(self.lowest) and is_number(self.highest)
        if not numbers or not 0 < self.lowest <= self.highest:
            raise ConfigError(
                f"lowest={self.lowest!r} and highest={self.highest!r} must be positive and in "
                "order: the range of the clip bound."
            )

    def noise(self, batch_size: int) -> float:
        """The standard deviation of the noise on a count."""
        return batch_size / 20 if self.count_noise is None else float(self.count_noise)

    def beside(self, batch_size: int, groups: int) -> float:
        """The inverse multiplier of the counts of all groups: sqrt(groups) / 2 over their noise."""
        noise = self.noise(batch_size)
        return math.sqrt(groups) / 2 / noise if noise else math.inf

    def __str__(self) -> str:
        name = self.groups if isinstance(self.groups, str) else "partition"
        settings = [f"{key} {getattr(self, key)!r}" for key in ("target", "rate", "count_noise")]
        return f"quantile, {name}, {', '.join(settings)}, in [{self.lowest!r}, {self.highest!r}]"


Clipping = Union["Partition", Auto, Quantile]
_NAMED: dict[str, Auto | Quantile] = {
    "auto": Auto("flat"),
    "auto_per_layer": Auto("per_layer"),
    "quantile": Quantile("flat"),
    "quantile_per_layer": Quantile("per_layer"),
}


def split_clipping(clipping: Clipping) -> tuple[Partition, Auto | Quantile | None]:
    """The partition of a clipping, and what it is beyond a fixed bound, None for that."""
    if isinstance(clipping, str):
        clipping = _NAMED.get(clipping, clipping)
    if isinstance(clipping, Auto | Quantile):
        return clipping.groups, clipping
    return clipping, None
