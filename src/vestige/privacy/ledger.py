"""The ledger: what a run has spent so far, in the order in which it was spent.

Every release charges the ledger before its noise is drawn, so a crash between the two can only
overstate the cost. The ledger is append-only: nothing takes a charge back, and a saved state is
loaded into an empty ledger only. With a file behind it (ledger_file.py) a charge is on the disk
before it returns. The ledger holds public numbers alone (sampling rate, noise, how often) and knows
nothing of data, models or epsilon; accounting.py turns its events into epsilon.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError, PrivacyError
from vestige.plan import ADJACENCY, common_adjacency

if TYPE_CHECKING:
    from vestige.privacy.ledger_file import Account, LedgerFile

_VERSION = 1


@dataclass(frozen=True)
class Event:
    """One Poisson-subsampled Gaussian release, composed with itself `count` times.

    `noise_multiplier` is the effective one: noise standard deviation over the joint sensitivity,
    with beta already divided out (sigma_eff). Zero means no noise and so no privacy; infinity
    means that nothing was revealed and costs nothing.
    """

    sample_rate: float
    noise_multiplier: float
    count: int = 1

    def __post_init__(self) -> None:
        # Plain Python numbers, so that events compare, hash and serialise the same everywhere.
        object.__setattr__(self, "sample_rate", _number(self.sample_rate, "sample_rate"))
        object.__setattr__(
            self, "noise_multiplier", _number(self.noise_multiplier, "noise_multiplier")
        )
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
        if isinstance(self.count, bool) or not isinstance(self.count, int) or self.count < 1:
            raise ConfigError(
                f"count {self.count!r} is not a whole number >= 1: give the number of releases"
            )


@dataclass(frozen=True)
class Facts:
    """What a claim over several runs has to say beside epsilon."""

    adjacency: str = ADJACENCY
    test_mode: bool = False  # a chosen seed made the lots and the noise of one of them


@dataclass(frozen=True)
class Spending:
    """One run on a ledger: the facts of its claim and its own charges."""

    facts: Facts
    own: Ledger


class Ledger:
    """Append-only record of releases: of one run, or of several on the same data.

    With a `file`, it begins with what the file already holds, and every charge is on the disk
    before it counts.

    Guarantee: after `charge` returns, every later answer of the ledger contains that charge, also
    after `state_dict` / `load_state_dict` into a fresh ledger.
    """

    def __init__(self, file: LedgerFile | None = None) -> None:
        self.file = file
        self._runs: list[Event] = list(file.content.events) if file else []
        if file:
            file.ledger = self
        self.runs: dict[str, Spending] = {}  # those that have charged it in this process, by name
        self.inherited = Facts()  # of runs that a saved state has brought along
        # The engines that have charged it, with their own charges; of a copy, how many there were.
        self._sessions: dict[str, Ledger | int] = {}
        self.engines = 0  # how many in this process have it
        self.pending: dict[str, Sequence[Event]] = {}  # lots that are handed out, not yet charged

    @classmethod
    def of(cls, events: Iterable[Event]) -> Ledger:
        """A ledger without a file that holds these charges."""
        made = cls()
        made._runs = list(events)
        return made

    def copy(self) -> Ledger:
        """A ledger without a file that holds the same charges of the same runs."""
        made = Ledger()
        made.take(self)
        return made

    def take(self, other: Ledger) -> None:
        """Compose with what is on another ledger, where there is no file."""
        self.add(other.events)
        self.runs |= other.runs
        if other.file:  # engines on it that are not in this process any more have ended
            self._sessions |= dict.fromkeys(other.file.content.sessions, sys.maxsize)
        for session, own in other._sessions.items():
            self._sessions[session] = own if isinstance(own, int) else own.steps
        self.inherited = together([self.inherited, other.facts()])

    def spends(self, session: str, run: str, spending: Spending) -> None:
        """That engine charges this ledger for that run, from now on."""
        self._sessions[session] = spending.own
        self.runs[run] = spending

    def has_all(self, session: str, charges: int) -> bool:
        """Whether these charges of an engine, all that it has made so far, are here."""
        known = self._sessions.get(session, -1)
        on_file = self.file is not None and session in self.file.content.sessions
        return on_file or isinstance(known, Ledger) or charges <= known

    def facts(self, but: str = "") -> Facts:
        """What holds for all runs with a charge, without the one named `but`."""
        found = [self.inherited]
        if self.file:
            found += [
                run.facts
                for run in self.file.content.runs.values()
                if run.events and run.run != but
            ]
        found += [one.facts for run, one in self.runs.items() if run != but]
        return together(found)

    def keep_in(self, file: LedgerFile) -> None:
        """From now on, have `file` behind this ledger, whose charges it has, if there are any."""
        known = self._sessions and set(self._sessions) <= file.content.sessions
        if self.file or (self._runs and not known):
            raise PrivacyError(
                f"this ledger already holds {self.steps} releases or has a file: name the file "
                "before the first release."
            )
        self.file, self._runs = file, list(file.content.events)
        file.ledger = self

    def charge(
        self, sample_rate: float, noise_multiplier: float, account: Account | None = None
    ) -> None:
        """Record one release. Call it before the noise is drawn.

        Where there is a file, `account` is that of the run on it.
        """
        event = Event(sample_rate, noise_multiplier)
        if self.file:
            if account is None:
                raise PrivacyError("a ledger with a file is charged by a run that is on it.")
            account.cover(event)
        if self._runs and _key(self._runs[-1]) == _key(event):
            # One assignment: an interrupt in between must not lose the earlier charges.
            self._runs[-1] = _repeated(event, self._runs[-1].count + 1)
        else:
            self._runs.append(event)

    @property
    def events(self) -> tuple[Event, ...]:
        """The charges in order, equal neighbours written as one event with a count."""
        return tuple(self._runs)

    def merged(self) -> tuple[Event, ...]:
        """The charges with all equal ones merged, sorted: what an accountant needs."""
        return merge(self._runs)

    @property
    def steps(self) -> int:
        """How many releases were charged."""
        return sum(event.count for event in self._runs)

    def state_dict(self) -> dict[str, Any]:
        """The ledger as strict JSON types (an infinite multiplier is the string "inf")."""
        return {
            "version": _VERSION,
            "events": [
                {
                    "sample_rate": event.sample_rate,
                    "noise_multiplier": (
                        event.noise_multiplier if math.isfinite(event.noise_multiplier) else "inf"
                    ),
                    "count": event.count,
                }
                for event in self._runs
            ],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what `state_dict` wrote, into an empty ledger only.

        A ledger that has charges refuses: replacing them could lower what was already spent.
        A ledger with a file stays as it is, since the file knows of everything. A malformed state
        raises and leaves the ledger as it was.
        """
        loaded = _parse(state)
        if self.file:
            return
        if self._runs:
            raise PrivacyError(
                f"this ledger already holds {self.steps} releases and loading would forget them: "
                "load the state into a fresh ledger before the first release"
            )
        self._sessions[""] = 0  # of no engine that a file could know
        self._runs = loaded

    def add(self, events: Iterable[Event]) -> None:
        """Let what was charged elsewhere compose with what is here, where there is no file."""
        if self.file:
            raise PrivacyError("a ledger with a file is charged by a run that is on it.")
        self._runs.extend(events)

    def __repr__(self) -> str:
        return f"Ledger(steps={self.steps}, events={len(self._runs)})"


def together(facts: Iterable[Facts]) -> Facts:
    """A claim over several runs is as weak as the weakest of theirs."""
    known = list(facts)
    return Facts(
        common_adjacency(one.adjacency for one in known), any(one.test_mode for one in known)
    )


def merge(events: Iterable[Event]) -> tuple[Event, ...]:
    """Events with equal ones merged, in a canonical order.

    Each event has a fixed worst case (a dominating pair), so the cost of a composition does not
    depend on the order of its releases and merging changes no epsilon.
    """
    counts: dict[tuple[float, float], int] = {}
    for event in events:
        counts[_key(event)] = counts.get(_key(event), 0) + event.count
    return tuple(Event(rate, noise, count) for (rate, noise), count in sorted(counts.items()))


def _key(event: Event) -> tuple[float, float]:
    return event.sample_rate, event.noise_multiplier


def _repeated(event: Event, count: int) -> Event:
    return Event(event.sample_rate, event.noise_multiplier, count)


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool | str):
        raise ConfigError(f"{name} {value!r} is not a number: give a float")
    try:
        return float(value)
    except (TypeError, ValueError):
        raise ConfigError(f"{name} {value!r} is not a number: give a float") from None


def _parse(state: Mapping[str, Any]) -> list[Event]:
    """The events of a saved state; anything but what `state_dict` writes is refused."""
    if not isinstance(state, Mapping) or set(state) != {"version", "events"}:
        raise ConfigError(
            "the ledger state is not a mapping with exactly 'version' and 'events': "
            "pass what Ledger.state_dict() returned"
        )
    if state["version"] != _VERSION:
        raise ConfigError(
            f"ledger state version {state['version']!r} is not {_VERSION}: "
            "load it with the version of vestige that wrote it"
        )
    if not isinstance(state["events"], list | tuple):
        raise ConfigError(
            f"ledger state 'events' is {type(state['events']).__name__}, not a list: "
            "pass what Ledger.state_dict() returned"
        )
    events = []
    for row in state["events"]:
        if not isinstance(row, Mapping) or set(row) != {"sample_rate", "noise_multiplier", "count"}:
            raise ConfigError(
                f"ledger event {row!r} is not a mapping with exactly 'sample_rate', "
                "'noise_multiplier' and 'count': pass what Ledger.state_dict() returned"
            )
        noise = math.inf if row["noise_multiplier"] == "inf" else row["noise_multiplier"]
        events.append(Event(row["sample_rate"], noise, row["count"]))
    return events
