"""The budget guard: no lot is drawn from whose cost would exceed `max_epsilon`.

For a plan that was fixed before the first lot, the longest beginning of it that stays within the
budget is solved for once, with the engine's accountant; after that the guard only counts. Where
other runs are on the same ledger, the settings of this one may have been chosen after seeing what
they released. Composition theorems for settings fixed in advance do not cover that, so the guard is
then a Rényi filter at one order (Feldman, Zrnic 2021, arXiv 2008.11193), which stops earlier.

Guarantee: a run that is stopped by the guard, or has not met it, is (max_epsilon, delta)-DP
together with everything else on its ledger.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from vestige.checks import is_number
from vestige.engine.forecast import coming_events, events_ahead, lots_left
from vestige.errors import BudgetExhausted, ConfigError
from vestige.plan import Table
from vestige.privacy import accounting
from vestige.privacy.composition import filter_share
from vestige.privacy.events import Event, Key, counts

if TYPE_CHECKING:
    from vestige.engine.run import Run


class BudgetGuard:
    """Refuses the lot that would exceed (max_epsilon, delta).

    Where several engines share a ledger, the lots that others have in hand count as charged.
    """

    def __init__(
        self,
        max_epsilon: float,
        delta: float | None,
        accountant: str,
        run: Run,
    ) -> None:
        if not is_number(max_epsilon) or not max_epsilon > 0:
            raise ConfigError(
                f"max_epsilon={max_epsilon!r} must be a finite number above 0: the epsilon that "
                "everything on the ledger may reach."
            )
        if delta is None:
            raise ConfigError(
                f"max_epsilon={max_epsilon} without a delta is no budget: give delta=..., well "
                "below 1 / records."
            )
        accounting.epsilon((), delta, accountant)  # refuses a bad delta
        self.max_epsilon, self.delta = float(max_epsilon), float(delta)
        if not run.plan.private or 0 in _values(run.plan.noise_multiplier):
            raise ConfigError(
                f"max_epsilon={max_epsilon} cannot be kept: method {run.plan.method!r} with this "
                "noise has no guarantee, and its first step would exceed any budget."
            )
        self._accountant, self._ledger, self._run = accountant, run.door.ledger, run
        self._cleared: Counter[Key] = Counter()  # known to stay within the budget

    @property
    def filters(self) -> bool:
        """Whether what is charged may have been chosen after seeing releases.

        So it is with other runs on the ledger, and where a lot was given up or lost in a crash
        under a schedule: the noise of the step is then used once more, for whatever reasons.
        """
        shared = self._ledger.engines > 1 or self._ledger.steps > self._run.door.own.steps
        repeated = self._run.gave_up or self._run.door.lost > 0
        return shared or (repeated and self._run.plan.scheduled)

    def check(self) -> None:
        """Return if the coming lot stays within the budget, else raise BudgetExhausted."""
        coming = coming_events(self._run, 1)
        if not coming:
            return  # an earlier charge covers the lot
        spent = self._spent()
        if self.filters:
            if not self.passes_filter(spent + coming):
                raise self._exhausted("as a Rényi filter")
        elif not counts(spent + coming) <= self._cleared and not self._clear(spent, coming_events):
            raise self._exhausted(f"by {self._accountant}")

    def affordable(self, lots: int) -> int:
        """How many of the next `lots` lots will be let through; asked between two lots."""
        spent = self._spent()

        def passes(lots: int) -> bool:
            events = spent + events_ahead(self._run, lots)
            return self.passes_filter(events) if filters else counts(events) <= self._cleared

        filters = self.filters
        if not filters and lots and not passes(1) and not self._clear(spent, events_ahead):
            return 0
        return _last(passes, 0, lots)

    def passes_filter(self, events: Sequence[Event]) -> bool:
        """Whether the Rényi filter lets all of this through."""
        within = filter_share(events, self.max_epsilon, self.delta) <= 1
        if within and self._accountant == "rdp_classic":  # whose figure is above the filter's
            within = self._epsilon(events) <= self.max_epsilon
        return within

    def _spent(self) -> list[Event]:
        open_lots = (e for run, e in self._ledger.pending.items() if run != self._run.door.run)
        return [*self._ledger.merged(), *(event for events in open_lots for event in events)]

    def _clear(self, spent: list[Event], coming: Callable[[Run, int], list[Event]]) -> bool:
        """Find how many of the coming lots fit; False where none does."""

        def fits(lots: int, accountant: str = self._accountant) -> bool:
            events = spent + coming(self._run, lots)
            return accounting.epsilon(events, self.delta, accountant) <= self.max_epsilon

        if not fits(1):
            return False
        low, high = 1, lots_left(self._run)
        if fits(high):
            low = high
        elif self._accountant == "pld":
            # The Rényi bound is cheap and above PLD: what it allows is allowed.
            low = max(1, _last(lambda n: fits(n, "rdp"), 0, high))
        low = _last(fits, low, high)
        self._cleared = counts(spent + coming(self._run, low))
        return True

    def _epsilon(self, events: Sequence[Event]) -> float:
        return accounting.epsilon(events, self.delta, self._accountant)

    def _exhausted(self, how: str) -> BudgetExhausted:
        now = self._epsilon(self._ledger.merged())
        return BudgetExhausted(
            f"the budget is spent: epsilon is {now:.4g} at delta {self.delta:g} after "
            f"{self._ledger.steps} releases, and one more would exceed max_epsilon "
            f"{self.max_epsilon:g} ({how}). The model is final; a larger max_epsilon is a new "
            "decision about the data."
        )


def _values(table: Table) -> tuple[float, ...]:
    return table if isinstance(table, tuple) else (table,)


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] with holds(n), which is known to hold at `low` and to fall."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
