"""What a search costs, solved before anything is drawn, and its charge on the ledgers.

Guarantee: inside `charged` the cost of the whole search is on the disk. Nothing is ever given back:
a search that is stopped stays charged.
"""

from __future__ import annotations

import contextlib
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.privacy import accounting, ledger_file
from vestige.privacy.accounting import Charge, events_of
from vestige.privacy.composition import prepared, renyi
from vestige.privacy.events import Event, merge
from vestige.privacy.ledger import Facts, Ledger
from vestige.privacy.ledger_file import LedgerFile, common_data
from vestige.privacy.selection import Law, Release, Selection

ACCOUNTANT = "rdp"  # the theorem is one about Rényi DP
METHOD = "private search"


@dataclass(frozen=True, kw_only=True)
class SearchCharge(Charge):
    """As `Charge`, of a whole search: `kinds` has the charges of each kind of trial."""

    law: Law
    kinds: tuple[tuple[tuple[Charge, int], ...], ...]

    def event(self, noise: float, count: int = 1) -> Event:
        """The search with this noise in every trial."""
        trials = [releases(events_of(dict(kind), noise)) for kind in self.kinds]
        return search_event(self.law, trials).times(count)


def releases(events: Sequence[Event]) -> tuple[Release, ...]:
    """Events of one trial as a selection names them."""
    return tuple((e.sample_rate, e.noise_multiplier, e.count) for e in merge(events))


def search_event(law: Law, trials: Sequence[tuple[Release, ...]]) -> Event:
    """The event of a search over trials of these kinds."""
    return Event.of(Selection(law, tuple(sorted(set(trials)))))


def charge_of(law: Law, kinds: Sequence[Mapping[Charge, int]]) -> SearchCharge:
    """The charge of a search whose trials all have one noise."""
    every = [charge for kind in kinds for charge in kind]
    return SearchCharge(
        sample_rate=max(charge.sample_rate for charge in every),
        weight=max(charge.weight for charge in every),
        beside=max(charge.beside for charge in every),
        law=law,
        kinds=tuple(tuple(kind.items()) for kind in kinds),
    )


def stays_within(spent: Sequence[Event], event: Event) -> bool:
    """Whether a trial's charges are at most the common curve that its search was charged for."""
    import numpy as np

    assert event.selection is not None
    kinds = [[Event(*release) for release in kind] for kind in event.selection.trials]
    allowed = np.max([renyi(prepared(kind)) for kind in kinds], axis=0)
    return bool((renyi(prepared(spent)) <= allowed * (1 + 1e-9)).all())


@dataclass(frozen=True)
class Bill:
    """A search on one ledger: the file, its event, and what the file held before."""

    path: Path
    event: Event
    delta: float
    data: Mapping[str, Any]
    facts: Facts
    earlier: tuple[Event, ...] = ()
    before: Facts = field(default_factory=Facts)

    @property
    def epsilon(self) -> float:
        """Of everything on the ledger, the search included."""
        return accounting.epsilon([*self.earlier, self.event], self.delta, ACCOUNTANT)

    @property
    def alone(self) -> float:
        """Of the search alone."""
        return accounting.epsilon([self.event], self.delta, ACCOUNTANT)

    @property
    def of_one_trial(self) -> float:
        """Of the costliest trial, had it been the only one: what the search must not claim."""
        selection = self.event.selection
        assert selection is not None
        kinds = [[Event(*release) for release in kind] for kind in selection.trials]
        return max(accounting.epsilon(kind, self.delta, ACCOUNTANT) for kind in kinds)


def bill(
    path: Path,
    data: Mapping[str, Any],
    facts: Facts,
    delta: float,
    event: Event | None = None,
    solve: tuple[float, SearchCharge] | None = None,
) -> tuple[Bill, float]:
    """The bill of a search with this `event`, or of one that is solved for, and its noise.

    `solve` is (epsilon, charge): the smallest noise at which everything on the ledger stays within.
    """
    earlier: tuple[Event, ...] = ()
    before, noise = Facts(), math.nan
    if path.exists():
        content = ledger_file.read(path)
        earlier, before = content.events, content.facts
        common_data([*(run.about for run in content.runs.values()), {"data": dict(data)}])
    if solve is not None:
        target, charge = solve
        noise, _ = accounting.noise_for(target, delta, {charge: 1}, ACCOUNTANT, earlier)
        event = charge.event(noise)
    assert event is not None
    made = Bill(path, event, delta, data, facts, earlier, before)
    if math.isinf(made.alone):
        raise ConfigError(
            "a trial of this search has no Rényi curve, because it has no noise: give a noise "
            "multiplier above 0, or --epsilon."
        )
    return made, noise


@contextlib.contextmanager
def charged(bills: Sequence[Bill]) -> Iterator[None]:
    """The whole search is on every ledger, on the disk, before anything inside runs.

    The ledgers stay in use while it does: what the winner claims is then what they hold.
    """
    with contextlib.ExitStack() as opened:
        files = []
        for one in bills:
            file = LedgerFile(one.path)
            opened.callback(file.close)
            if file.content.events != one.earlier:
                raise ConfigError(
                    f"the ledger {str(one.path)!r} was charged by another run while the search was "
                    "prepared: start it again, and what was spent will be counted."
                )
            Ledger(file).check_unit(one.facts, "")
            files.append(file)
        for one, file in zip(bills, files, strict=True):
            about = {
                "data": dict(one.data),
                "method": METHOD,
                "adjacency": one.facts.adjacency,
                "test_mode": one.facts.test_mode,
            }
            file.account(secrets.token_hex(8), about, block=1).cover(one.event)
        yield
