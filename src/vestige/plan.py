"""The plan: the frozen public facts of a private run.

Sampler, noise, divisor and accountant all read their numbers here, so they cannot disagree. No
field depends on the records, except `dataset_size` where it was not declared: it is then len(data),
and the run's caveats say that the size is treated as public.

A schedule (of beta, of the noise, of the sampling rate) is a number, a sequence with one number per
step, or a function of the step. It becomes a table before the first lot is drawn, so it cannot
depend on data or on releases: that is what lets the accountant compose the steps one by one
(FO-DP-SGD equation 41, SMA-DP-SGD theorem 3). Beyond its last entry a table holds its last value.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, TypeVar

from vestige.checks import Shown, as_json, check_count, is_number, plain
from vestige.errors import ConfigError

Schedule = float | Sequence[float] | Callable[[int], float]
Table = float | tuple[float, ...]
_T = TypeVar("_T")
ADJACENCY = "add or remove one record"
USER = "one user with all rows"
AVERAGES = ("ema", "uniform-tail", "fractional")
_DECAY = 0.99


@dataclass(frozen=True, repr=False)
class PrivacyPlan(Shown):
    """What was fixed before the first lot was drawn.

    Guarantee: `lots_per_epoch` and `sample_rate` are computed once, in integers where they can be,
    and used by loader, accountant and calibration alike.

    `sample_rate` is the one that lots are charged at (dp-is: its cap; correlated noise is charged
    by cycles or trees, at the rates that its method says). It, `noise_multiplier` and `beta` are
    numbers, or tables with one number per step where they follow a schedule; `noise_stds` has
    one number per group, or such a row per step. With bounds that change (quantile clipping, a clip
    schedule) `bounds` and `noise_stds` are those of the first step.
    """

    method: str
    dataset_size: int
    size_declared: bool
    batch_size: int
    sample_rate: Table
    clipping: str
    group_names: tuple[str, ...]
    bounds: tuple[float, ...]
    noise_multiplier: Table
    noise_stds: tuple[float, ...] | tuple[tuple[float, ...], ...]
    beta: Table = 1.0
    settings: Mapping[str, Any] = field(default_factory=dict)
    averaging: str | None = None
    history_dtype: str | None = None
    steps: int | None = None
    max_physical_batch_size: int | None = None
    loss_reduction: str = "mean"
    count_noise: float | None = None  # of quantile clipping: on the count of each group
    adjacency: str = ADJACENCY
    private: bool = True  # False: the method leaks elsewhere and is charged without noise
    views: int | None = None  # of each record, clipped together; None without augment
    rows_per_unit: int | None = None  # of a user, at most, in a lot; None: a unit is a record

    @property
    def unit_rows(self) -> int:
        """The rows of each privacy unit in a batch: its records times their views."""
        return (self.rows_per_unit or 1) * (self.views or 1)

    @property
    def units_per_batch(self) -> int | None:
        """The privacy units of a physical batch: none is split over two."""
        most = self.max_physical_batch_size
        return None if most is None else most // self.unit_rows

    @property
    def counted(self) -> str:
        """What `dataset_size` and `batch_size` count: records, or users."""
        return "records" if self.rows_per_unit is None else "users"

    @property
    def lots_per_epoch(self) -> int:
        """ceil(dataset_size / batch_size), in integers."""
        return lots_per_epoch(self.dataset_size, self.batch_size)

    @property
    def expected_lot(self) -> float:
        """The expected size of the largest lot: `batch_size`, or what a declared rate makes it."""
        rates = self.sample_rate if isinstance(self.sample_rate, tuple) else (self.sample_rate,)
        usual = self.batch_size / self.dataset_size
        return self.batch_size if max(rates) == usual else max(rates) * self.dataset_size

    @property
    def sensitivity(self) -> float:
        """How far one record moves the clipped sum: sqrt(sum_g C_g^2)."""
        return math.sqrt(sum(c * c for c in self.bounds))

    @property
    def scheduled(self) -> bool:
        """Whether the noise, the rate or beta differ from step to step."""
        tables = (self.noise_multiplier, self.sample_rate, self.beta)
        return any(isinstance(table, tuple) for table in tables)

    def rate_of(self, lot: int) -> float:
        """The sampling rate of lot `lot`."""
        return at(self.sample_rate, lot)

    def beta_of(self, step: int) -> float:
        """The weight of the clipped sum in release `step`."""
        return at(self.beta, step)

    def as_dict(self) -> dict[str, Any]:
        """The plan as plain JSON types."""
        return {f.name: as_json(getattr(self, f.name)) for f in fields(self)}

    def _shown(self, whole: bool) -> Mapping[str, object]:
        groups = len(self.bounds)
        size = "declared" if self.size_declared else "public"
        facts: dict[str, object] = {
            "method": self.method + ("" if self.private else " (no guarantee)"),
            self.counted: f"{self.dataset_size} ({size})",
            "lot": f"{self.batch_size} expected",
            "sampling rate": _span(self.sample_rate),
            "clipping": f"{self.clipping}, {groups} group{'s' * (groups > 1)}, "
            f"norm {self.sensitivity:g} in all",
            "noise multiplier": _span(self.noise_multiplier),
            "releases": "no planned number" if self.steps is None else f"{self.steps} planned",
            "neighbouring data": self.adjacency,
        }
        if self.rows_per_unit is not None:
            facts["privacy unit"] = f"{USER}, at most {self.rows_per_unit} of them in a lot"
        if self.views is not None:
            facts["views of a record"] = self.views
        if whole:
            facts |= {"lots of an epoch": self.lots_per_epoch, "beta": _span(self.beta)}
            settings = as_json(self.settings, lambda value: type(value).__name__)
            facts |= {f"{self.method}: {name}": value for name, value in settings.items()}
        return facts

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `as_dict` gave."""
        return cls(**{name: plain(value) for name, value in saved.items()})


def parsed_averaging(averaging: str) -> tuple[str, float]:
    """The kind of an average of the weights and its decay: "ema:0.999" has its own."""
    kind, _, decay = averaging.partition(":")
    if kind not in AVERAGES or (decay and kind != "ema"):
        raise ConfigError(
            f"averaging={averaging!r} is unknown: choose one of {', '.join(AVERAGES)}, or "
            "ema:0.999 for a decay of your own."
        )
    try:
        value = float(decay or _DECAY)
    except ValueError:
        value = math.nan
    if not 0 < value < 1:
        raise ConfigError(
            f"averaging={averaging!r} has no decay between 0 and 1: write ema:0.999, for example."
        )
    return kind, value


def _span(table: Table) -> str:
    values = table if isinstance(table, tuple) else (table,)
    low, high = f"{min(values):g}", f"{max(values):g}"
    return low if low == high else f"{low} to {high}"


def lots_per_epoch(dataset_size: int, batch_size: int) -> int:
    """The number of lots in an epoch: ceil(dataset_size / batch_size)."""
    return -(-dataset_size // batch_size)


def sampling_rate(
    dataset_size: int,
    batch_size: int,
    sample_rate: Schedule | None = None,
    steps: int | None = None,
) -> Table:
    """The Poisson rate: the declared one or its table, or batch_size / dataset_size."""
    check_count("dataset_size", dataset_size)
    check_count("batch_size", batch_size)
    if batch_size > dataset_size:
        raise ConfigError(
            f"the lot of {batch_size} is larger than the data of {dataset_size} records: "
            "use a batch_size of at most the dataset's size."
        )
    if sample_rate is None:
        return batch_size / dataset_size
    return tabulate("sample_rate", sample_rate, steps, _check_rate)


def _check_rate(rate: Any) -> None:
    if not is_number(rate) or not 0 < rate <= 1:
        raise ConfigError(
            f"sample_rate={rate} must be in (0, 1]: it is each record's chance to be in a "
            "lot; leave it out for batch_size / dataset_size."
        )


def common_adjacency(kinds: Iterable[str]) -> str:
    """The relation that runs of these adjacencies are all private for.

    What hides whether a record is there hides what it says, so zeroing out a record is common to
    runs for which that was claimed and to runs for adding or removing one. Not the reverse. A
    record without a gradient adds nothing to a sum or a count, so both moves cost the same. Runs
    for records and runs for users have nothing in common: no ledger has both.
    """
    return "; and ".join(sorted(set(kinds) - {ADJACENCY})) or ADJACENCY


def of_users(adjacency: str) -> str:
    """The same relation between data sets that differ in one user, with all of the user's rows."""
    return adjacency.replace("one record", USER).replace("of records", "of users")


def constant(values: Sequence[_T]) -> _T | tuple[_T, ...]:
    """The value that all of them have, or the values."""
    return values[0] if all(value == values[0] for value in values) else tuple(values)


def tabulate(
    name: str, schedule: Schedule, steps: int | None, check: Callable[[Any], None]
) -> Table:
    """The schedule as a number, if it is constant, or as one number per step."""
    schedule = plain(schedule)
    if callable(schedule):
        values = [plain(schedule(step)) for step in range(needs_steps(name, steps))]
    elif isinstance(schedule, tuple):
        values = list(schedule)
        if not values or (steps is not None and len(values) != steps):
            raise ConfigError(
                f"{name} has {len(values)} values for {steps or 'an unknown number of'} steps: "
                "give one value per step, a number, or a function of the step."
            )
    else:
        values = [schedule]
    for value in values:
        check(value)
    return constant([float(value) for value in values])


def needs_steps(name: str, steps: int | None) -> int:
    """The number of steps, which a function of the step cannot be tabulated without."""
    if steps is None:
        raise ConfigError(
            f"{name} is a function of the step, which is tabulated before the run: pass steps=..., "
            "the number of lots of the whole run."
        )
    return steps


def at(table: Table, step: int) -> float:
    """The value at `step`."""
    return table[min(step, len(table) - 1)] if isinstance(table, tuple) else table
