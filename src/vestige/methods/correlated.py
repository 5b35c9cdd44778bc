"""Methods whose noise is correlated from lot to lot: fractional noise, banded inverse, DP-FTRL."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from vestige.errors import ConfigError
from vestige.methods.catalogue import METHODS
from vestige.methods.method import FIXED_SENSITIVITY, DrawContext, Feature, Method
from vestige.methods.settings import Count, Decay, Inside, Switch
from vestige.plan import Table, needs_steps
from vestige.privacy.accounting import Charge
from vestige.privacy.factorisation import (
    coefficients,
    inverse_root,
    inverse_sensitivity,
    tree_sensitivity,
)
from vestige.release.correlated import Banded, Moving, Tree
from vestige.release.correlation import Correlation
from vestige.sampling.lots import CyclicPoisson, FixedOrder


class _Correlated(Method):
    """What they share."""

    def excludes(self) -> Mapping[Feature, str]:
        """Anything that moves the sensitivity, and a correction for noise that nobody knows."""
        return {
            **FIXED_SENSITIVITY,
            Feature.DENOISED_CORRECTION: (
                "has correlated noise, of which a denoiser leaves what {value} cannot know: leave "
                "the denoiser out, or use another optimizer."
            ),
        }

    def _one_rate(self, rate: Table, why: str) -> float:
        if isinstance(rate, tuple):
            raise ConfigError(
                f"method {self.name!r} takes no schedule of the sampling rate: {why}."
            )
        return rate

    def _length(self, restart: int | None, steps: int | None, lots_per_epoch: int) -> int:
        """The lots of a tree or block: of `restart` epochs, or of all steps."""
        if restart is None:
            return needs_steps(f"the noise of method {self.name!r}", steps)
        return restart * lots_per_epoch


@dataclass(frozen=True)
class FractionalNoise(_Correlated):
    """The papers' power-law memory moved from the signal into the noise.

        release_t = clipped sum_t + n_t,   n_t = |c| z_t - c_1 n_(t-1) - ... - c_(b-1) n_(t-b+1)
        c_0 = 1,   c_k = c_(k-1) (k - 1 + order) / k,   z_t white with standard deviation sigma C

    The noise of a step partly takes back that of earlier steps, so that less of it accumulates in
    the weights. Order 1/2 is the square-root factorisation; one band is DP-SGD. Records are split
    into `bands` groups that take turns, each record on its own; a lot is drawn from one group at
    `bands` times the sampling rate. `vestige plan` says what is gained.

    Papers: BandMF, arXiv 2306.08153; square-root factorisation, arXiv 2202.11205. Fractional orders
    between are ours.
    """

    info = METHODS["fractional-noise"]

    order: Inside = 0.8
    bands: Count = 8

    def charged_rate(self, rate: Table) -> Table:
        """The rate stays that of a lot; a cycle is charged at bands times it."""
        self._cycle_rate(rate)
        return rate

    def _cycle_rate(self, rate: Table) -> float:
        rate = self._one_rate(rate, "its groups take turns at one rate")
        if self.bands * rate > 1 + 1e-12:  # bands * (lot / records) may be above 1 by rounding
            raise ConfigError(
                f"bands={self.bands} times the sampling rate {rate:g} is {self.bands * rate:g}, "
                "above 1: a group would have too few records for its lots. Use fewer bands (at "
                f"most {int(1 / rate + 1e-9)}) or a smaller lot."
            )
        return min(1.0, self.bands * rate)

    def charges(
        self, rate: Table, beta: Table, steps: int, lots_per_epoch: int, beside: float
    ) -> Counter[Charge]:
        """One for each cycle of the groups."""
        return Counter({Charge(self._cycle_rate(rate)): -(-steps // self.bands)})

    def noise(self, context: DrawContext) -> Correlation:
        """The banded process, charged once a cycle."""
        like, streams = context.like, context.randomness
        weights = coefficients(self.order, self.bands)
        process = Banded(like, lambda row: streams.normal_blocks(like, row), weights)
        return Correlation(process, self.bands, Charge(self._cycle_rate(context.plan.sample_rate)))

    def lots(self, context: DrawContext) -> CyclicPoisson:
        """Cyclic Poisson lots."""
        rate = context.plan.sample_rate
        assert not isinstance(rate, tuple)
        return CyclicPoisson(context.randomness, context.records, rate, self.bands)


@dataclass(frozen=True)
class BandedInverse(_Correlated):
    """Noise that is a weighted sum of this step's draw and of the last ones, made again.

        release_t = clipped sum_t + n_t,   n_t = z_t + d_1 z_(t-1) + ... + d_(b-1) z_(t-b+1)
        sum_k d_k x^k = sqrt((1 - x) (1 - momentum x)),   z_t white with standard deviation sigma C

    A draw follows from (key, lot), so no past noise is kept, however many bands. `momentum` is that
    of the optimizer, or the decay of an average of the weights: what the noise is made small for.
    Records are split into as many groups as there are lots in the data, each record on its own; the
    groups take turns. `restart` epochs make a block of noise; None is one over all `steps`.

    Guarantee: each block is one Gaussian at sigma / s without amplification by sampling, s the norm
    of the sum of the columns of C = D^-1 at a record's lots (factorisation.py).
    Papers: banded inverse square root, arXiv 2505.12128; momentum, arXiv 2405.13763.
    """

    info = METHODS["banded-inverse"]

    bands: Count = 16
    momentum: Decay = 0.0
    restart: Count | None = None  # epochs

    def charged_rate(self, rate: Table) -> Table:
        """The share of a lot in the data; blocks are charged at rate 1."""
        return self._one_rate(rate, "its groups take turns at one rate")

    def _block(self, rate: Table, steps: int | None, lots_per_epoch: int) -> tuple[int, Charge]:
        """The lots of a block, and its charge."""
        length = self._length(self.restart, steps, lots_per_epoch)
        d = inverse_root(self.momentum, self.bands)
        return length, Charge(1.0, inverse_sensitivity(d, length, self._turns(rate, length)))

    def _turns(self, rate: Table, length: int) -> int:
        """How many groups take turns: a record's lots are so far apart, or once in a block."""
        return min(
            int(1 / self._one_rate(rate, "its groups take turns at one rate") + 1e-9), length
        )

    def charges(
        self, rate: Table, beta: Table, steps: int, lots_per_epoch: int, beside: float
    ) -> Counter[Charge]:
        """One for each block that is begun."""
        length, charge = self._block(rate, steps, lots_per_epoch)
        return Counter({charge: -(-steps // length)})

    def noise(self, context: DrawContext) -> Correlation:
        """The moving sum, charged once a block."""
        like, streams, plan = context.like, context.randomness, context.plan
        length, charge = self._block(plan.sample_rate, plan.steps, plan.lots_per_epoch)
        d = inverse_root(self.momentum, self.bands)
        process = Moving(like, lambda row: streams.normal_blocks(like, row), d, length)
        return Correlation(process, length, charge, self._turns(plan.sample_rate, length))

    def lots(self, context: DrawContext) -> CyclicPoisson:
        """The groups in turn; a lot leaves out of its group what makes the rate an exact one."""
        plan = context.plan
        assert not isinstance(plan.sample_rate, tuple)
        length = self._length(self.restart, plan.steps, plan.lots_per_epoch)
        turns = self._turns(plan.sample_rate, length)
        return CyclicPoisson(context.randomness, context.records, plan.sample_rate, turns)


@dataclass(frozen=True)
class DPFTRL(_Correlated):
    """Prefix sums of the gradients with the noise of a binary tree, without sampling.

        theta_(t+1) = theta_0 - lr (G_t + N_t) / L,   N_t the tree's noise of the first t sums

    The release of step t carries N_(t+1) - N_t, so that any torch optimizer sees the noise of the
    tree. The data comes in one fixed random order, the same in every epoch. `restart` epochs make a
    tree; it is completed to a power of two when the next begins. None is one tree over all `steps`.

    Paper: Kairouz et al. 2021, arXiv 2103.00039; Honaker's estimate is its variance-reduced form.
    """

    info = METHODS["dp-ftrl"]

    honaker: Switch = True
    restart: Count | None = None  # epochs

    def charged_rate(self, rate: Table) -> Table:
        """The share of a lot in the data; nothing is sampled, so trees are charged at rate 1."""
        return self._one_rate(rate, "it does not sample")

    def _tree(self, steps: int | None, lots_per_epoch: int) -> tuple[int, Charge]:
        """The lots of a tree, and its charge."""
        length = self._length(self.restart, steps, lots_per_epoch)
        return length, Charge(1.0, math.sqrt(tree_sensitivity(length, lots_per_epoch)))

    def charges(
        self, rate: Table, beta: Table, steps: int, lots_per_epoch: int, beside: float
    ) -> Counter[Charge]:
        """One for each tree that is begun."""
        length, charge = self._tree(steps, lots_per_epoch)
        return Counter({charge: -(-steps // length)})

    def noise(self, context: DrawContext) -> Correlation:
        """The tree process, charged once a tree."""
        like, streams, plan = context.like, context.randomness, context.plan
        length, charge = self._tree(plan.steps, plan.lots_per_epoch)
        process = Tree(like, lambda node: streams.normal_blocks(like, node), length, self.honaker)
        return Correlation(process, length, charge)

    def lots(self, context: DrawContext) -> FixedOrder:
        """Every record once an epoch, always in the same place."""
        plan, records = context.plan, context.records
        if records != plan.dataset_size:
            raise ConfigError(
                f"dataset_size={plan.dataset_size} is not the number of records, {records}: the "
                f"fixed order of method {self.name!r} takes that number as public. Leave "
                "dataset_size out."
            )
        if plan.sample_rate != plan.batch_size / records:
            raise ConfigError(
                f"sample_rate={plan.sample_rate} does nothing for method {self.name!r}, which "
                "does not sample: leave it out."
            )
        return FixedOrder(context.randomness, records, plan.batch_size)
