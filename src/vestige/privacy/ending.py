"""How a run ended, and what its claim must count for it.

The releases of a stopped run are a beginning of those that were planned. Cutting the rest off is
post-processing of all planned releases, so their epsilon holds wherever the cut is, also where
somebody chose it after seeing releases. The smaller epsilon of the beginning alone holds only where
the cut was fixed before the first lot: by the plan, or by a budget guard that counts a fixed plan.
A guard that works as a Rényi filter lets everything follow what was seen; its claim is max_epsilon,
as long as nobody charges more to the same ledger than the filter allows.

Guarantee: the claim holds for an end that was chosen after seeing releases; where nothing bounds
the end (`OPEN`), the text says what the claim rests on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vestige.privacy import accounting
from vestige.privacy.composition import filter_epsilon, filter_share
from vestige.privacy.events import Event
from vestige.privacy.ledger import Ledger

AS_PLANNED, GUARD = "as planned", "budget guard"
PLANNED, FILTER, OPEN = "planned releases", "renyi filter", "open"


@dataclass(frozen=True)
class Ending:
    """Why a run ended where it did; `unmade` are charges that its claim counts all the same.

    `limit` is (max_epsilon, delta) of the Rényi filter, where that makes the claim.
    """

    kind: str
    unmade: tuple[Event, ...] = ()
    limit: tuple[float, float] | None = None

    def on(self, spent: Sequence[Event]) -> Ending:
        """This ending for a ledger that holds `spent`.

        A filter bounds what it has let through. Where runs without one have charged more to the
        ledger, it bounds nothing, and the end is open.
        """
        if self.limit is None or filter_share([*spent, *self.unmade], *self.limit) <= 1:
            return self
        return Ending(OPEN, self.unmade)

    def epsilon(self, spent: Sequence[Event], delta: float, accountant: str) -> float:
        """The claim at `delta`, for a ledger that holds `spent`."""
        if (limit := self.on(spent).limit) is not None:
            return filter_epsilon(*limit, delta)
        return accounting.epsilon([*spent, *self.unmade], delta, accountant)

    def state(self) -> dict[str, Any]:
        """The ending as plain JSON types."""
        limit = None if self.limit is None else list(self.limit)
        return {"kind": self.kind, "unmade": Ledger.of(self.unmade).state_dict(), "limit": limit}

    @classmethod
    def restored(cls, state: Mapping[str, Any]) -> Ending:
        """What `state` gave."""
        unmade = Ledger()
        unmade.load_state_dict(state["unmade"])
        return cls(state["kind"], unmade.events, state["limit"] and tuple(state["limit"]))
