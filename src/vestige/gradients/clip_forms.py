"""The forms of clipping beyond a fixed bound: automatic and quantile clipping, as public settings.

Nothing here imports torch: settings are checked before anything slow begins.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Union

from vestige.checks import is_number
from vestige.errors import ConfigError

if TYPE_CHECKING:
    from vestige.gradients.groups import Partition


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
        own = [f"{key} {getattr(self, key)!r}" for key in ("target", "rate", "count_noise")]
        return f"quantile, {name}, {', '.join(own)}, in [{self.lowest!r}, {self.highest!r}]"


Clipping = Union["Partition", Auto, Quantile]
_NAMED: dict[str, Auto | Quantile] = {
    "auto": Auto("flat"),
    "auto_per_layer": Auto("per_layer"),
    "quantile": Quantile("flat"),
    "quantile_per_layer": Quantile("per_layer"),
}


def taken_apart(clipping: Clipping) -> tuple[Partition, Auto | Quantile | None]:
    """The partition of a clipping, and what it is beyond a fixed bound, None for that."""
    if isinstance(clipping, str):
        clipping = _NAMED.get(clipping, clipping)
    if isinstance(clipping, Auto | Quantile):
        return clipping.groups, clipping
    return clipping, None
