"""DP-FTRL: prefix sums of the gradients with the noise of a binary tree, without sampling.

    theta_(t+1) = theta_0 - lr (G_t + N_t) / L,   N_t the tree's noise of the first t sums

The release of step t carries N_(t+1) - N_t, so that any torch optimizer sees the noise of the tree.
The data comes in one fixed random order, the same in every epoch. `restart` epochs make a tree; it
is completed to a power of two when the next begins. None is one tree over all `steps`.

Paper: Kairouz et al. 2021, arXiv 2103.00039; Honaker's estimate is its variance-reduced form.
Guarantee: for zeroing out one record (its gradient becomes zero, its place stays; the number of
records is public), not for adding or removing one. Each tree is one Gaussian without sampling at
sigma / sqrt(sum over nodes of (the record's lots in the node)^2).
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.errors import ConfigError
from vestige.methods.base import Method, Surroundings
from vestige.plan import Table, needs_steps
from vestige.privacy.accounting import Charge

if TYPE_CHECKING:
    from vestige.release.correlation import Correlation
    from vestige.sampling.loader import Drawing


@dataclass(frozen=True)
class DPFTRL(Method):
    """Tree aggregation. Proven for zeroing out one record: one Gaussian for each tree."""

    name: ClassVar[str] = "dp-ftrl"
    paper: ClassVar[str] = "Kairouz et al. 2021, arXiv 2103.00039"
    guarantee: ClassVar[str] = (
        "proven for zeroing out one record: one unsampled Gaussian for each tree"
    )
    summary: ClassVar[str] = "noise of a binary tree, data in a fixed order, no sampling"
    extra_memory: ClassVar[str] = "(3 + log2 steps) x parameters (secret)"
    fixed_sensitivity: ClassVar[bool] = True
    adjacency: ClassVar[str] = "zero out one record (fixed order, public number of records)"

    honaker: bool = True
    restart: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.honaker) is not bool:
            raise ConfigError(f"honaker={self.honaker!r} must be True or False.")
        restart = self.restart
        if restart is not None and (type(restart) is not int or restart < 1):
            raise ConfigError(
                f"restart={restart!r} must be a whole number of epochs of at least 1, or None for "
                "one tree."
            )

    def charged_rate(self, rate: Table) -> Table:
        """The share of a lot in the data; nothing is sampled, so trees are charged at rate 1."""
        if isinstance(rate, tuple):
            raise ConfigError(
                f"method {self.name!r} takes no schedule of the sampling rate: it does not sample."
            )
        return rate

    def _tree(self, steps: int | None, lots_per_epoch: int) -> tuple[int, Charge]:
        """The lots of a tree, and its charge."""
        from vestige.privacy.factorisation import tree_sensitivity

        if self.restart is None:
            length = needs_steps(f"the tree of method {self.name!r}", steps)
        else:
            length = self.restart * lots_per_epoch
        return length, Charge(1.0, math.sqrt(tree_sensitivity(length, lots_per_epoch)))

    def charges(
        self, rate: Table, beta: Table, steps: int, lots_per_epoch: int, beside: float
    ) -> Counter[Charge]:
        """One for each tree that is begun."""
        length, charge = self._tree(steps, lots_per_epoch)
        return Counter({charge: -(-steps // length)})

    def correlation(self, around: Surroundings) -> Correlation:
        """The tree process, charged once a tree."""
        from vestige.release.correlated import Tree
        from vestige.release.correlation import Correlation

        like, plan = around.like, around.plan
        length, charge = self._tree(plan.steps, plan.lots_per_epoch)
        process = Tree(
            like,
            lambda node: around.randomness.normal_blocks(like, node),
            length,
            self.honaker,
        )
        return Correlation(process, length, charge)

    def drawing(self, around: Surroundings) -> Drawing:
        """Every record once an epoch, always in the same place."""
        from vestige.sampling.orders import FixedOrder

        if around.records != around.plan.dataset_size:
            raise ConfigError(
                f"dataset_size={around.plan.dataset_size} is not the number of records, "
                f"{around.records}: the fixed order of method {self.name!r} takes that number as "
                "public. Leave dataset_size out."
            )
        if around.plan.sample_rate != around.plan.batch_size / around.records:
            raise ConfigError(
                f"sample_rate={around.plan.sample_rate} does nothing for method {self.name!r}, "
                "which does not sample: leave it out."
            )
        return FixedOrder(around.randomness, around.records, around.plan.batch_size)
