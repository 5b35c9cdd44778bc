"""Which noise accumulates least at the same guarantee: what `vestige plan` computes.

A step of gradient descent adds a release, so the model carries the prefix sums of the noise. With Z
white, A the lower-triangular matrix of ones (prefix sums) and T steps, their root mean square per
coordinate, in clipping norms, is

    DP-SGD             sigma_1 |A|_F / sqrt(T)
    filters            sigma_1 |A H|_F / sqrt(T)               H the filter's impulse response
    fractional noise   sigma_b |c| |A C^-1|_F / sqrt(T)        noise C^-1 Z, C banded with rows of c

with c the fractional power of A, cut off after `bands` (factorisation.py).
A filter (momentum, FO, SMA) follows the release of DP-SGD and treats signal and noise alike; its
gain is 1 for a constant. Every matrix is Toeplitz, so a column stands for it and T may be large.

Papers: BandMF, arXiv 2306.08153; square-root factorisation (order 1/2), arXiv 2202.11205.
Guarantee: all rows are (epsilon, delta)-DP for adding or removing one record, at the same epsilon
and accountant. DP-SGD and its filters: T Poisson-subsampled Gaussians at rate lot / records.
Fractional noise: the records are split into `bands` groups, each record on its own and without
regard to the others, and the groups take turns at rate bands * lot / records. Lots of one record
are then `bands` steps apart, where the columns of C do not overlap: ceil(T / bands) subsampled
Gaussians with multiplier sigma_b.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from pydantic import Field, model_validator

from vestige import methods
from vestige.errors import ConfigError
from vestige.methods.catalogue import METHODS
from vestige.plan import at, lots_per_epoch
from vestige.privacy import accounting
from vestige.privacy.options import Accountant, Count, Delta, Options, Positive

if TYPE_CHECKING:
    from vestige.privacy.factorisation import Series

ORDERS = (0.3, 0.5, 0.65, 0.8, 0.9)
BANDS = (2, 4, 8, 16, 32, 64)
MOMENTUM = 0.9
MIN_GAIN = 0.02
"""Fractional noise that gains less than this is not worth its memory and its sampling."""
BASELINE, FRACTIONAL = "dp-sgd", "fractional-noise"

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

    `noise_multiplier` is the accounted one (for FO and SMA: sigma / beta), `events` and
    `sample_rate` are what it was calibrated for, `epsilon` what it reaches. `step_noise` is the
    noise of a single step. Both are root mean squares over the steps, per coordinate, in clipping
    norms. `memory` counts vectors of the model's size, `delay` the steps by which the signal lags.
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
        return tuple(r for r in self.rows if r.method not in (BASELINE, FRACTIONAL))

    @property
    def fractional(self) -> tuple[Row, ...]:
        """Fractional noise, by bands and then by order."""
        return tuple(row for row in self.rows if row.method == FRACTIONAL)

    @cached_property
    def best(self) -> Row | None:
        """The fractional noise that accumulates least within the memory; None if none fits."""
        allowed = [row for row in self.fractional if self.request.fits(row.memory)]
        return min(allowed, key=lambda row: (row.ratio, row.memory), default=None)

    @property
    def recommended(self) -> Row:
        """The best fractional noise if it gains MIN_GAIN, else DP-SGD.

        A filter is never a candidate: what it takes off the accumulated noise at the end of a
        short run is its delay, and it delays the signal as much.
        """
        if self.best is not None and 1 - self.best.ratio >= MIN_GAIN:
            return self.best
        return self.baseline

    def as_dict(self) -> dict[str, Any]:
        """The comparison as plain JSON types."""
        row = self.recommended
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
                "best_fractional": None if self.best is None else asdict(self.best),
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
    unit, _ = dp_sgd().noise(steps)
    grid = [1, *(bands for bands in BANDS if bands * lot <= size)]
    rows: list[Row] = []
    for number, bands in enumerate(grid, start=1):
        progress(f"calibrating the noise: bands {bands} ({number} of {len(grid)})")
        rate, events = bands * lot / size, -(-steps // bands)
        found = accounting.calibrate(
            request.epsilon, request.delta, rate, events, request.accountant
        )
        sigma = found.noise_multiplier
        white = rows[0].prefix_error if rows else sigma * unit
        for form in forms(bands):
            accumulated, single = (sigma * noise for noise in form.noise(steps))
            row = Row(
                method=form.method,
                settings=form.settings,
                order=form.settings.get("order"),
                bands=bands,
                sample_rate=rate,
                events=events,
                noise_multiplier=sigma,
                epsilon=found.epsilon,
                prefix_error=accumulated,
                ratio=accumulated / white,
                step_noise=single,
                memory=form.memory,
                delay=form.delay,
            )
            rows.append(row)
    return Comparison(request, tuple(rows))


@dataclass(frozen=True)
class Form:
    """A way to shape white noise at multiplier 1: the response gain / denominator(z) to one draw.

    `filters` says that the signal goes through it too, with gain / denominator(1) = 1.
    """

    method: str
    settings: dict[str, float]
    memory: int
    gain: float
    denominator: Series
    filters: bool = False

    @property
    def delay(self) -> float:
        """The steps by which a steady signal lags: the response's centre of mass."""
        if not self.filters:
            return 0.0
        lags = range(len(self.denominator))
        return -float(self.denominator @ lags) / float(self.denominator.sum())

    def response(self, steps: int) -> Series:
        """The first column of the Toeplitz matrix that makes the noise of all steps."""
        from vestige.privacy.factorisation import inverse_response

        return self.gain * inverse_response(self.denominator, steps)

    def noise(self, steps: int) -> tuple[float, float]:
        """Root mean square over the steps of the noise's prefix sums, and of the noise itself."""
        import numpy as np

        column = self.response(steps)
        # Entry t of the column stands in the matrix steps - t times.
        times = np.arange(steps, 0, -1) / steps
        return math.sqrt(times @ np.cumsum(column) ** 2), math.sqrt(times @ column**2)


def forms(bands: int) -> list[Form]:
    """What is compared at that many bands: DP-SGD and its filters at 1, else every order."""
    if bands > 1:
        return [fractional(order, bands) for order in ORDERS]
    return [
        dp_sgd(),
        momentum(MOMENTUM),
        *(memory(method) for method in (methods.FO(), methods.SMA())),
    ]


def dp_sgd() -> Form:
    """White noise."""
    return replace(fractional(1.0, 1), method=BASELINE, settings={})


def fractional(order: float, bands: int) -> Form:
    """Noise |c| C^-1 Z with the first `bands` coefficients c of (1 - z)^-order; 1 band: DP-SGD."""
    from vestige.privacy.factorisation import coefficients, norm

    c = coefficients(order, bands)
    settings = {"order": order, "bands": bands}
    return Form(FRACTIONAL, settings, bands - 1, norm(c), c)


def momentum(decay: float) -> Form:
    """(1 - m) m^k: momentum with the learning rate that keeps the sum of the updates."""
    import numpy as np

    settings = {"momentum": decay}
    return Form("momentum", settings, 1, 1 - decay, np.array([1.0, -decay]), filters=True)


def memory(method: methods.FO | methods.SMA) -> Form:
    """beta / (1 - (1 - beta) sum_j a_j z^-j) with a_j like (j + 1)^(alpha - 1): FO and SMA.

    Without their gates, which follow the releases, and with an empty past at the start.
    """
    import numpy as np

    beta = at(methods.share(method, None), 0)
    weights = np.arange(2, method.window + 1) ** (method.alpha - 1.0)
    denominator = np.concatenate([[1.0], -(1 - beta) * weights / weights.sum()])
    settings = {"beta": beta, "alpha": method.alpha, "window": method.window}
    return Form(method.name, settings, method.window + 1, beta, denominator, filters=True)
