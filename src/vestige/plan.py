"""The plan: the frozen public facts of a private run.

Sampler, noise, divisor and accountant all read their numbers here, so they cannot disagree. No
field depends on the records, except `dataset_size` where it was not declared: it is then len(data),
and the run's caveats say that the size is treated as public.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from vestige.errors import ConfigError
from vestige.schedule import Schedule, Table, at, is_number, tabulate

ADJACENCY = "add or remove one record"


@dataclass(frozen=True)
class PrivacyPlan:
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

    @property
    def lots_per_epoch(self) -> int:
        """ceil(dataset_size / batch_size), in integers."""
        return lots_per_epoch(self.dataset_size, self.batch_size)

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
        return {f.name: _plain(getattr(self, f.name)) for f in fields(self)}

    @classmethod
    def restored(cls, saved: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `as_dict` gave."""
        return cls(**{name: frozen(value) for name, value in saved.items()})


def frozen(value: Any) -> Any:
    """JSON with tuples in place of its lists, as settings have them."""
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value


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
    record without a gradient adds nothing to a sum or a count, so both moves cost the same.
    """
    return "; and ".join(sorted(set(kinds) - {ADJACENCY})) or ADJACENCY


def check_count(name: str, value: Any) -> int:
    """A positive whole number, or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    return value
