"""The ledger: what a run has spent so far, in the order in which it was spent.

Every release charges the ledger before its noise is drawn, so a crash between the two can only
overstate the cost. It holds public numbers alone (sampling rate, noise, how often) and knows
nothing of data, models or epsilon.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError, PrivacyError
from vestige.plan import ADJACENCY, USER, common_adjacency
from vestige.privacy.events import Event, merge

if TYPE_CHECKING:
    from vestige.privacy.ledger_file import Account, LedgerFile

__all__ = ["Event", "Facts", "Ledger", "Spending", "merge", "together"]
_VERSION = 1


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
        for session, charges in other._sessions.items():
            self._sessions[session] = charges if isinstance(charges, int) else charges.steps
        self.inherited = together([self.inherited, other.facts()])

    def spends(self, session: str, run: str, spending: Spending) -> None:
        """That engine charges this ledger for that run, from now on."""
        if not spending.own.steps:
            self.check_unit(spending.facts, run)
        self._sessions[session] = spending.own
        self.runs[run] = spending

    def has_all(self, session: str, charges: int) -> bool:
        """Whether these charges of an engine, all that it has made so far, are here."""
        of_engine = self._sessions.get(session, -1)
        on_file = self.file is not None and session in self.file.content.sessions
        return on_file or isinstance(of_engine, Ledger) or charges <= of_engine

    def facts(self, but: str = "") -> Facts:
        """What holds for all runs with a charge, without the one named `but`."""
        return together([self.inherited, *self._others(but)])

    def _others(self, but: str) -> list[Facts]:
        on_file = self.file.content.runs if self.file else {}
        charged = {name: run for name, run in on_file.items() if run.events}
        others = [run.facts for name, run in charged.items() if name != but]
        return others + [run.facts for name, run in self.runs.items() if name != but]

    def check_unit(self, facts: Facts, run: str) -> None:
        """Refuse a run that protects users on a ledger of records, or the other way round."""
        users, others = USER in facts.adjacency, self._others(run)
        others += [self.inherited] if self.inherited != Facts() else []
        if self.steps and any(users != (USER in other.adjacency) for other in others):
            there, here = ("records", "users") if users else ("users", "records")
            raise ConfigError(
                f"the ledger holds {self.steps} releases that are charged for {there}, and "
                f"this run protects {here}: their costs have no sum. Give it a ledger of its own, "
                f"PrivacyEngine(ledger=FILE), and publish both figures, each with its unit."
            )

    def keep_in(self, file: LedgerFile) -> None:
        """From now on, have `file` behind this ledger, whose charges it has, if there are any."""
        same_engines = self._sessions and set(self._sessions) <= file.content.sessions
        if self.file or (self._runs and not same_engines):
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
        if self._runs and self._runs[-1].key == event.key:
            # One assignment: an interrupt in between must not lose the earlier charges.
            self._runs[-1] = event.times(self._runs[-1].count + 1)
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
        return {"version": _VERSION, "events": [event.as_json() for event in self._runs]}

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

    def follow(self, events: Iterable[Event]) -> None:
        """Hold what the ledger of rank 0 holds, which alone is written down."""
        if self.file:
            raise PrivacyError("a ledger with a file is nobody's copy.")
        self._runs = list(events)

    def __repr__(self) -> str:
        return f"Ledger(steps={self.steps}, events={len(self._runs)})"


def together(facts: Iterable[Facts]) -> Facts:
    """A claim over several runs is as weak as the weakest of theirs."""
    every = list(facts)
    return Facts(
        common_adjacency(one.adjacency for one in every), any(one.test_mode for one in every)
    )


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
    return [Event.from_json(row) for row in state["events"]]
