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

from vestige import accounting
from vestige.composition import filter_share
from vestige.errors import BudgetExhausted, ConfigError
from vestige.ledger import Event, Ledger, merge
from vestige.schedule import is_number


class BudgetGuard:
    """Refuses the lot that would exceed (max_epsilon, delta).

    `forecast(n)` gives the events of the next n lots, the first of which is about to be drawn from;
    `horizon()` how many lots the plan still has, at least 1.
    """

    def __init__(
        self,
        max_epsilon: float,
        delta: float | None,
        accountant: str,
        ledger: Ledger,
        run: Callable[[], str],
        forecast: Callable[[int], Sequence[Event]],
        horizon: Callable[[], int],
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
        self._accountant, self._ledger, self._run = accountant, ledger, run
        self._forecast, self._horizon = forecast, horizon
        self._cleared: Counter[tuple[float, float]] = Counter()  # known to stay within the budget

    @property
    def filters(self) -> bool:
        """Whether other runs are on the ledger, so that settings may depend on releases."""
        return self._ledger.engines > 1 or bool(self._ledger.in_file(self._run())[1])

    def check(self) -> None:
        """Return if the coming lot stays within the budget, else raise BudgetExhausted."""
        spent = list(self._ledger.merged())
        coming = list(self._forecast(1))
        if not coming:
            return  # an earlier charge covers the lot
        if self.filters:
            if filter_share(spent + coming, self.max_epsilon, self.delta) > 1:
                raise self._exhausted("as a Rényi filter")
            return
        if not _counts(spent + coming) <= self._cleared:
            self._clear(spent)

    def _clear(self, spent: list[Event]) -> None:
        """Find how many of the coming lots fit."""

        def fits(lots: int, accountant: str = self._accountant) -> bool:
            events = spent + list(self._forecast(lots))
            return accounting.epsilon(events, self.delta, accountant) <= self.max_epsilon

        if not fits(1):
            raise self._exhausted(f"by {self._accountant}")
        low, high = 1, self._horizon()
        if fits(high):
            low = high
        elif self._accountant == "pld":
            # The Rényi bound is cheap and above PLD: what it allows is allowed.
            low = max(1, _last(lambda n: fits(n, "rdp"), 0, high))
        low = _last(fits, low, high)
        self._cleared = _counts(spent + list(self._forecast(low)))

    def _exhausted(self, how: str) -> BudgetExhausted:
        now = accounting.epsilon(self._ledger.merged(), self.delta, self._accountant)
        return BudgetExhausted(
            f"the budget is spent: epsilon is {now:.4g} at delta {self.delta:g} after "
            f"{self._ledger.steps} releases, and one more would exceed max_epsilon "
            f"{self.max_epsilon:g} ({how}). The model is final; a larger max_epsilon is a new "
            "decision about the data."
        )


def _counts(events: Sequence[Event]) -> Counter[tuple[float, float]]:
    return Counter({(e.sample_rate, e.noise_multiplier): e.count for e in merge(events)})


def _last(holds: Callable[[int], bool], low: int, high: int) -> int:
    """The largest n in [low, high] with holds(n), which is known to hold at `low` and to fall."""
    while low < high:
        middle = (low + high + 1) // 2
        if holds(middle):
            low = middle
        else:
            high = middle - 1
    return low
