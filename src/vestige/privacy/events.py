"""What a release costs, as public numbers: a sampling rate, a noise multiplier, and how often.

Or what a whole private search costs (selection.py), which is one event.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from vestige.checks import is_whole
from vestige.errors import ConfigError
from vestige.privacy.selection import Selection

Key = tuple[float, float] | tuple[float, float, Selection]
_NAMES = ("sample_rate", "noise_multiplier", "count")
_MOST = 2**53  # releases: a larger number is no exact float, and nobody makes so many


@dataclass(frozen=True)
class Event:
    """One Poisson-subsampled Gaussian release, composed with itself `count` times.

    `noise_multiplier` is the effective one: noise standard deviation over the joint sensitivity,
    with beta already divided out (sigma_eff). Zero means no noise and so no privacy; infinity
    means that nothing was revealed and costs nothing.

    With a `selection` it is a private search instead: rate 1 and multiplier 0 stand there, so that
    whoever does not look at the selection counts a release without privacy.
    """

    sample_rate: float
    noise_multiplier: float
    count: int = 1
    selection: Selection | None = None

    def __post_init__(self) -> None:
        # Plain Python numbers, so that events compare, hash and serialise the same everywhere.
        for name in _NAMES[:2]:
            object.__setattr__(self, name, _number(getattr(self, name), name))
        if not 0 < self.sample_rate <= 1:
            raise ConfigError(
                f"sample_rate {self.sample_rate} is not in (0, 1]: give the probability with which "
                "each record enters a lot, expected lot size / dataset size"
            )
        if not self.noise_multiplier >= 0:
            raise ConfigError(
                f"noise_multiplier {self.noise_multiplier} is not >= 0: give the noise standard "
                "deviation divided by the sensitivity (0 means no privacy)"
            )
        if not is_whole(self.count) or not 1 <= self.count <= _MOST:
            large = is_whole(self.count) and self.count > _MOST  # too many digits to be shown
            raise ConfigError(
                f"count {'above 2^53' if large else repr(self.count)} is not a whole number from 1 "
                "to 2^53: give the number of releases"
            )
        if self.selection is not None:
            if (self.sample_rate, self.noise_multiplier) != (1.0, 0.0):
                raise ConfigError("a selection has sample_rate 1 and noise_multiplier 0.")
            for kind in self.selection.trials:
                for release in kind:
                    Event(*release)  # refuses what is none

    @classmethod
    def of(cls, selection: Selection) -> Event:
        """The event of a whole private search."""
        return cls(1.0, 0.0, 1, selection)

    @property
    def key(self) -> Key:
        """What equal events have in common: everything but how often."""
        if self.selection is not None:
            return self.sample_rate, self.noise_multiplier, self.selection
        return self.sample_rate, self.noise_multiplier

    @property
    def multipliers(self) -> tuple[float, ...]:
        """Of the release, or of all releases that a trial of the search may make."""
        if self.selection is None:
            return (self.noise_multiplier,)
        return tuple(noise for kind in self.selection.trials for _, noise, _ in kind)

    def times(self, count: int) -> Event:
        """The same release, so often."""
        return Event(self.sample_rate, self.noise_multiplier, count, self.selection)

    def as_json(self) -> dict[str, Any]:
        """The event as strict JSON types: an infinite multiplier is the string "inf"."""
        noise = self.noise_multiplier if math.isfinite(self.noise_multiplier) else "inf"
        row: dict[str, Any] = dict(zip(_NAMES, (self.sample_rate, noise, self.count), strict=True))
        return row if self.selection is None else row | {"selection": self.selection.as_json()}

    @classmethod
    def from_json(cls, row: Any) -> Event:
        """The event that `as_json` gave; ConfigError for anything else."""
        if not isinstance(row, Mapping) or set(row) - {"selection"} != set(_NAMES):
            raise ConfigError(
                f"ledger event {row!r} is not a mapping with exactly 'sample_rate', "
                "'noise_multiplier' and 'count': pass what Ledger.state_dict() returned"
            )
        noise = math.inf if row["noise_multiplier"] == "inf" else row["noise_multiplier"]
        selection = Selection.from_json(row["selection"]) if "selection" in row else None
        return cls(row["sample_rate"], noise, row["count"], selection)

    def as_row(self) -> list[Any]:
        """The values of `as_json` alone, as the lines of a ledger file have them."""
        return list(self.as_json().values())

    @classmethod
    def from_row(cls, row: Any) -> Event:
        """The event that `as_row` gave."""
        names = (*_NAMES, "selection")[: max(3, len(row))]
        return cls.from_json(dict(zip(names, row, strict=True)))


def counts(events: Iterable[Event]) -> Counter[Key]:
    """How often each kind of event is there."""
    counted: Counter[Key] = Counter()
    for event in events:
        counted[event.key] += event.count
    return counted


def from_counts(counted: Mapping[Key, int]) -> tuple[Event, ...]:
    """The events of so many of each kind, in a canonical order."""
    return tuple(
        Event(key[0], key[1], count, *key[2:]) for key, count in sorted(counted.items()) if count
    )


def merge(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events with equal ones merged, in a canonical order.

    Each event has a fixed worst case (a dominating pair), so the cost of a composition does not
    depend on the order of its releases and merging changes no epsilon.
    """
    return from_counts(counts(events))


def _number(value: Any, name: str) -> float:
    try:
        if not isinstance(value, bool | str):
            return float(value)
    except (TypeError, ValueError):
        pass
    raise ConfigError(f"{name} {value!r} is not a number: give a float")
