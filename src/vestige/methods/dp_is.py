"""DP-IS: importance sampling by clipped gradient norms, with a privately released normaliser.

See vestige.engine.importance for the equations. The loader hands out all records once before each
epoch, in pieces, to measure the normaliser; the loop treats these batches like any other, and the
optimizer does nothing on them.

Paper: DPIS, Wei et al. 2022, arXiv 2210.09634. The schedule of the paper could not be established;
a normaliser once an epoch and its floor are ours.
Guarantee: one unsampled Gaussian at norm_noise for each normaliser; each step a Gaussian at sigma,
subsampled at the public rate batch_size / (floor * dataset_size).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

from vestige.errors import ConfigError
from vestige.methods.base import Method
from vestige.methods.checks import check_positive, check_share
from vestige.plan import Table
from vestige.privacy.accounting import Charge, step_charges


@dataclass(frozen=True)
class DPIS(Method):
    """Importance sampling. Proven: subsampled Gaussians, and one Gaussian for each normaliser."""

    name: ClassVar[str] = "dp-is"
    paper: ClassVar[str] = "Wei et al. 2022, arXiv 2210.09634"
    guarantee: ClassVar[str] = (
        "proven: subsampled Gaussians at sigma and the capped rate, and one unsampled Gaussian at "
        "norm_noise for each epoch"
    )
    summary: ClassVar[str] = "examples drawn in proportion to their gradient norms"
    fixed_sensitivity: ClassVar[bool] = True
    flat_only: ClassVar[bool] = True

    floor: float = 0.5
    norm_noise: float = 50.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("floor", self.floor)
        check_positive("norm_noise", self.norm_noise)

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
        found = step_charges(rate, beta, steps, beside=beside)
        found[Charge(1.0, 0.0, 1 / self.norm_noise)] += -(-steps // lots_per_epoch)
        return found
