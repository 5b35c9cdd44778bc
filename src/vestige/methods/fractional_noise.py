"""Fractional noise: the papers' power-law memory moved from the signal into the noise.

    release_t = clipped sum_t + n_t,   n_t = |c| z_t - c_1 n_(t-1) - ... - c_(b-1) n_(t-b+1)
    c_0 = 1,   c_k = c_(k-1) (k - 1 + order) / k,   z_t white with standard deviation sigma C

The noise of a step partly takes back that of earlier steps, so that less of it accumulates in the
weights. Order 1/2 is the square-root factorisation; one band is DP-SGD. Records are split into
`bands` groups that take turns, each record on its own; a lot is drawn from one group at `bands`
times the sampling rate. `vestige plan` says what is gained.

Papers: BandMF, arXiv 2306.08153; square-root factorisation, arXiv 2202.11205. Fractional orders
between are ours.
Guarantee: lots of one record are at least `bands` steps apart, where the columns of the noise's
matrix do not overlap: ceil(steps / bands) subsampled Gaussians at sigma and bands * sampling rate.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.methods.base import Method, Surroundings
from vestige.plan import Table
from vestige.privacy.accounting import Charge

if TYPE_CHECKING:
    from vestige.release.correlation import Correlation
    from vestige.sampling.loader import Drawing


@dataclass(frozen=True)
class FractionalNoise(Method):
    """Banded fractional noise. Proven: one subsampled Gaussian at sigma per cycle of the groups."""

    name: ClassVar[str] = "fractional-noise"
    paper: ClassVar[str] = "after Choquette-Choo et al. 2023, arXiv 2306.08153"
    guarantee: ClassVar[str] = (
        "proven: ceil(steps / bands) subsampled Gaussians at sigma, rate bands * lot / records"
    )
    summary: ClassVar[str] = "noise that takes back a part of earlier noise"
    extra_memory: ClassVar[str] = "bands x parameters (secret)"
    fixed_sensitivity: ClassVar[bool] = True

    order: float = 0.8
    bands: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.order) or not 0 < self.order < 1:
            raise ConfigError(
                f"order={self.order!r} must be strictly between 0 and 1; 0.5 is the square-root "
                "factorisation."
            )
        if type(self.bands) is not int or self.bands < 1:
            raise ConfigError(f"bands={self.bands!r} must be a whole number of at least 1.")

    def charged_rate(self, rate: Table) -> Table:
        """The rate stays that of a lot; a cycle is charged at bands times it."""
        if isinstance(rate, tuple):
            raise ConfigError(
                f"method {self.name!r} takes no schedule of the sampling rate: its groups take "
                "turns at one rate."
            )
        self._cycle_rate(rate)
        return rate

    def _cycle_rate(self, rate: float) -> float:
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
        assert not isinstance(rate, tuple)
        return Counter({Charge(self._cycle_rate(rate)): -(-steps // self.bands)})

    def correlation(self, around: Surroundings) -> Correlation:
        """The banded process, charged once a cycle."""
        from vestige.privacy.factorisation import coefficients
        from vestige.release.correlated import Banded
        from vestige.release.correlation import Correlation

        like, rate = around.like, around.plan.sample_rate
        assert not isinstance(rate, tuple)
        process = Banded(
            like,
            lambda row: around.randomness.normal_blocks(like, row),
            coefficients(self.order, self.bands),
        )
        return Correlation(process, self.bands, Charge(self._cycle_rate(rate)))

    def drawing(self, around: Surroundings) -> Drawing:
        """Cyclic Poisson lots."""
        from vestige.sampling.orders import CyclicPoisson

        rate = around.plan.sample_rate
        assert not isinstance(rate, tuple)
        return CyclicPoisson(around.randomness, around.records, rate, self.bands)
