"""Which noise accumulates least at the same guarantee: what `vestige plan` computes.

A step of gradient descent adds a release, so the model carries the prefix sums of the noise. With Z
white, A the lower-triangular matrix of ones (prefix sums) and T steps, their root mean square per
coordinate, in clipping norms, is

    DP-SGD             sigma_1 |A|_F / sqrt(T)
    filters            sigma_1 |A H|_F / sqrt(T)               H the filter's impulse response
    fractional noise   sigma_b |c| |A C^-1|_F / sqrt(T)        noise C^-1 Z, C banded with rows of c
    banded inverse     sigma s |A D|_F / sqrt(T)               noise D Z, D banded, C = D^-1 full
    DP-FTRL            sigma s, times the root of the mean number of nodes of a prefix

with c the fractional power of A, cut off after `bands`, D that of A^-1/2, and s what one record
moves C G or the nodes by (factorisation.py). The last step carries the largest noise, except in a
tree.
A filter (momentum, FO, SMA) follows the release of DP-SGD and treats signal and noise alike; its
gain is 1 for a constant. Every matrix is Toeplitz, so a column stands for it and T may be large.

Papers: BandMF, arXiv 2306.08153; square-root factorisation (order 1/2), arXiv 2202.11205; banded
inverse square root, arXiv 2505.12128; trees, arXiv 2103.00039.
Guarantee: all rows are (epsilon, delta)-DP for adding or removing one record, at the same epsilon
and accountant; DP-FTRL for zeroing out one record instead, so that it is shown and no candidate.
DP-SGD and its filters: T Poisson-subsampled Gaussians at rate lot / records.
Fractional noise: the records are split into `bands` groups, each record on its own and without
regard to the others, and the groups take turns at rate bands * lot / records. Lots of one record
are then `bands` steps apart, where the columns of C do not overlap: ceil(T / bands) subsampled
Gaussians with multiplier sigma_b. Banded inverse and DP-FTRL: a record comes once in an epoch, and
the run is one Gaussian with multiplier sigma, without amplification by sampling.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from pydantic import Field, model_validator

from vestige import methods
from vestige.errors import ConfigError
from vestige.methods.catalogue import METHODS
from vestige.methods.noise_forms import (
    BASELINE,
    FRACTIONAL,
    INVERSE,
    TREE,
    Form,
    banded_inverse,
    dp_sgd,
    fractional,
    memory,
    momentum,
    tree,
)
from vestige.plan import ADJACENCY, lots_per_epoch
from vestige.privacy import accounting
from vestige.privacy.options import Accountant, Count, Delta, Options, Positive

ORDERS = (0.3, 0.5, 0.65, 0.8, 0.9)
BANDS = (2, 4, 8, 16, 32, 64)
MOMENTUM = 0.9
MIN_GAIN = 0.02
"""Correlated noise that gains less than this is not worth its memory, draws and sampling."""

_MAX_STEPS = 10**7  # a column of numbers per step is kept, and there are some thirty rows


class Request(Options):
    """The training to plan. Raises ConfigError for a bad value, before anything is computed."""

    dataset_size: Count = Field(description="Number of training records.")
    lot: Count = Field(description="Expected lot size.")
    epochs: Count = Field(description="Length of the training.")
    epsilon: Positive = Field(description="The epsilon that every row reaches.")
    delta: Delta = 1e-5
    accountant: Accountant = "pld"
    max_memory: int | None = Field(
        default=None, ge=0, description="Most vectors of the model's size that the noise may keep."
    )

    @model_validator(mode="after")
    def _check_sizes(self) -> Request:
        if self.lot > self.dataset_size:
            raise ConfigError(
                f"lot {self.lot} is larger than the dataset of {self.dataset_size} records: give a "
                "lot of at most the dataset's size."
            )
        if self.steps > _MAX_STEPS:
            raise ConfigError(
                f"epochs {self.epochs} of {self.steps // self.epochs} lots are {self.steps} steps, "
                f"more than {_MAX_STEPS}: raise the lot or lower the epochs."
            )
        return self

    @property
    def steps(self) -> int:
        """The number of releases T."""
        return self.epochs * lots_per_epoch(self.dataset_size, self.lot)

    def fits(self, memory: int) -> bool:
        """Whether that many vectors may be kept."""
        return self.max_memory is None or memory <= self.max_memory


@dataclass(frozen=True)
class Row:
    """One way to add noise. `ratio` compares `prefix_error`, the accumulated noise, with DP-SGD's.

    `noise_multiplier` is the accounted one (FO and SMA: sigma / beta; banded inverse and DP-FTRL:
    sigma / sensitivity), `events` and `sample_rate` are what it was calibrated for, `epsilon` what
    it reaches, `amplified` whether sampling lowers it. `step_noise` is the noise of a single step.
    Both are root mean squares over the steps, per coordinate, in clipping norms; `prefix_max` and
    `step_max` are those of the noisiest step. `memory` counts vectors of the model's size, `delay`
    the steps by which the signal lags.
    """

    method: str
    settings: dict[str, float]
    order: float | None
    bands: int
    sample_rate: float
    events: int
    noise_multiplier: float
    epsilon: float
    prefix_error: float
    ratio: float
    step_noise: float
    memory: int
    delay: float
    prefix_max: float
    step_max: float
    amplified: bool
    adjacency: str


@dataclass(frozen=True)
class Comparison:
    """All rows at one guarantee, DP-SGD first, and the choice among them."""

    request: Request
    rows: tuple[Row, ...]

    @property
    def baseline(self) -> Row:
        """DP-SGD."""
        return self.rows[0]

    @property
    def filters(self) -> tuple[Row, ...]:
        """Momentum, FO and SMA."""
        correlated = (BASELINE, FRACTIONAL, INVERSE, TREE)
        return tuple(row for row in self.rows if row.method not in correlated)

    @property
    def fractional(self) -> tuple[Row, ...]:
        """Fractional noise, by bands and then by order."""
        return self.of(FRACTIONAL)

    def of(self, *names: str) -> tuple[Row, ...]:
        """The rows of some methods."""
        return tuple(row for row in self.rows if row.method in names)

    @cached_property
    def best(self) -> Row | None:
        """The correlated noise that accumulates least within the memory; None if none fits."""
        return self._least(FRACTIONAL, INVERSE)

    def _least(self, *names: str) -> Row | None:
        allowed = [row for row in self.of(*names) if self.request.fits(row.memory)]
        return min(allowed, key=lambda row: (row.ratio, row.memory), default=None)

    @property
    def recommended(self) -> Row:
        """The best correlated noise if it gains MIN_GAIN, else DP-SGD.

        A filter is never a candidate: what it takes off the accumulated noise at the end of a
        short run is its delay, and it delays the signal as much.
        """
        if self.best is not None and 1 - self.best.ratio >= MIN_GAIN:
            return self.best
        return self.baseline

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON types."""
        row, fractional = self.recommended, self._least(FRACTIONAL)
        return {
            **self.request.model_dump(),
            "steps": self.request.steps,
            "accountant": accounting.accountant_name(self.request.accountant),
            "guarantee": accounting.GUARANTEE,
            "rows": [asdict(each) for each in self.rows],
            "recommendation": {
                "method": row.method,
                "settings": row.settings,
                "ratio": row.ratio,
                "gain": 1 - row.ratio,
                "memory": row.memory,
                "available": available(row.method),
                "best_fractional": None if fractional is None else asdict(fractional),
                "best_correlated": None if self.best is None else asdict(self.best),
                "min_gain": MIN_GAIN,
            },
        }


def available(method: str) -> bool:
    """Whether this version can train with the method."""
    return method in METHODS


def compare(request: Request, progress: Callable[[str], None] = lambda _: None) -> Comparison:
    """Calibrate every row to the request's epsilon and measure its noise.

    The noise multiplier depends on the bands alone, not on the order, so a handful of calibrations
    serves all rows, each with the accountant that was asked for. `progress` is told of each.
    """
    size, lot, steps = request.dataset_size, request.lot, request.steps
    grid = [1, *(bands for bands in BANDS if bands * lot <= size)]
    rows: list[Row] = []
    for number, bands in enumerate(grid, start=1):
        progress(f"calibrating the noise: bands {bands} ({number} of {len(grid)})")
        _add(rows, request, forms(bands), bands * lot / size, -(-steps // bands))
    progress("calibrating the noise: without sampling")
    _add(rows, request, unsampled(steps, size // lot, lots_per_epoch(size, lot)), 1.0, 1)
    return Comparison(request, tuple(rows))


def _add(rows: list[Row], request: Request, each: list[Form], rate: float, events: int) -> None:
    """The rows of some forms, calibrated for so many events at a rate. DP-SGD is added first."""
    found = accounting.calibrate(request.epsilon, request.delta, rate, events, request.accountant)
    sigma = found.noise_multiplier
    for form in each:
        accumulated, single = (sigma * noise for noise in form.noise(request.steps))
        most, most_single = (sigma * noise for noise in form.largest(request.steps))
        white = rows[0].prefix_error if rows else accumulated
        row = Row(
            method=form.method,
            settings=form.settings,
            order=form.settings.get("order"),
            bands=int(form.settings.get("bands", 1)),
            sample_rate=rate,
            events=events,
            noise_multiplier=sigma,
            epsilon=found.epsilon,
            prefix_error=accumulated,
            ratio=accumulated / white,
            step_noise=single,
            memory=form.memory,
            delay=form.delay,
            prefix_max=most,
            step_max=most_single,
            amplified=rate < 1,
            adjacency=METHODS[form.method].adjacency if form.method in METHODS else ADJACENCY,
        )
        rows.append(row)


def forms(bands: int) -> list[Form]:
    """What is compared at that many bands: DP-SGD and its filters at 1, else every order."""
    if bands > 1:
        return [fractional(order, bands) for order in ORDERS]
    return [
        dp_sgd(),
        momentum(MOMENTUM),
        *(memory(method) for method in (methods.FO(), methods.SMA())),
    ]


def unsampled(steps: int, turns: int, period: int) -> list[Form]:
    """Every banded inverse for records that come every `turns` lots, and a tree for `period`."""
    inverses = [banded_inverse(bands, steps, turns) for bands in BANDS if bands <= steps]
    return [*inverses, tree(steps, period)]
