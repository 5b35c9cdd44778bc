"""DP-SGD, and DP-IS, which draws its lots by the examples' norms."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import cast

from vestige.errors import ConfigError
from vestige.gradients.clipping import Clip
from vestige.methods.catalogue import METHODS
from vestige.methods.method import (
    FIXED_SENSITIVITY,
    OWN_FILTER,
    WHOLE_GRADIENT,
    BuildContext,
    DrawContext,
    Feature,
    Method,
)
from vestige.methods.settings import Positive, Share
from vestige.plan import Table
from vestige.privacy.accounting import Charge, step_charges
from vestige.release.part import Part
from vestige.updates.importance import Importance, ImportanceClip


@dataclass(frozen=True)
class DPSGD(Method):
    """DP-SGD: clip each example's gradient, add up, add noise, take any torch optimizer's step.

        release = sum_{i in lot} clip_C(g_i) + N(0, sigma^2 C^2 I);   gradient = release / lot

    Paper: Abadi et al. 2016, arXiv 1607.00133.
    """

    info = METHODS["dp-sgd"]
    whole = ""


@dataclass(frozen=True)
class CurrentOnly(DPSGD):
    """DP-SGD by the name that it has in the FO paper's ablation of memories (equation 23)."""

    info = METHODS["current-only"]


@dataclass(frozen=True)
class DPIS(Method):
    """DP-IS: importance sampling by clipped norms, with a privately released normaliser.

    See vestige.updates.importance for the equations. The loader hands out all records once before
    each epoch, in pieces, to measure the normaliser; the loop treats these batches like any other,
    and the optimizer does nothing on them.

    Paper: DPIS, Wei et al. 2022, arXiv 2210.09634. The schedule of the paper could not be
    established; a normaliser once an epoch and its floor are ours.
    """

    info = METHODS["dp-is"]
    whole = "draws lots by the norms of all records, which it measures apart from a sum"

    floor: Share = 0.5
    norm_noise: Positive = 50.0

    def excludes(self) -> Mapping[Feature, str]:
        """Anything that moves the bound or the rate, and workers that draw lots ahead."""
        return {
            **FIXED_SENSITIVITY,
            **WHOLE_GRADIENT,
            **OWN_FILTER,
            Feature.WORKERS: (
                "draws each lot after the last release, so workers cannot read ahead: use "
                "num_workers=0 instead of {value}."
            ),
        }

    def charged_rate(self, rate: Table) -> Table:
        """The cap of the superset's rate: batch_size / (floor * dataset_size)."""
        if isinstance(rate, tuple):
            raise ConfigError(f"method {self.name!r} has a sampling rate of its own: no schedule.")
        if rate > self.floor:
            raise ConfigError(
                f"floor={self.floor} is below the sampling rate {rate:g}, so that the capped rate "
                "would exceed 1: raise the floor or use a smaller lot."
            )
        return rate / self.floor

    def charges(
        self, rate: Table, beta: Table, steps: int, lots_per_epoch: int, beside: float
    ) -> Counter[Charge]:
        """The steps, and a normaliser before each epoch."""
        charges = step_charges(rate, beta, steps, beside=beside)
        charges[Charge(1.0, 0.0, 1 / self.norm_noise)] += -(-steps // lots_per_epoch)
        return charges

    def lots(self, context: DrawContext) -> Importance:
        """Supersets at a rate that follows the normaliser."""
        cap = cast("float", context.plan.sample_rate)
        size, records = context.plan.dataset_size, context.records
        return Importance(context.randomness, records, size, cap, self.floor, self.norm_noise)

    def clip(self, context: BuildContext) -> Clip:
        """Accepted examples are scaled to the bound, the others contribute nothing."""
        return ImportanceClip(context.clip.bounds, importance=cast("Importance", context.lots))

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """What undoes the scaling."""
        return [cast("Importance", context.lots)]
