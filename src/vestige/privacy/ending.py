"""How a run ended, and what its claim must count for it.

The releases of a stopped run are a beginning of those that were planned. Cutting the rest off is
post-processing of all planned releases, so their epsilon holds wherever the cut is, also where
somebody chose it after seeing releases. The smaller epsilon of the beginning alone holds only where
the cut was fixed before the first lot: by the plan, or by a budget guard that counts a fixed plan.
A guard that works as a Rényi filter lets everything follow what was seen; its claim is max_epsilon.

Guarantee: the claim holds for an end that was chosen after seeing releases; where nothing bounds
the end (`OPEN`), the text says what the claim rests on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vestige.privacy import accounting
from vestige.privacy.composition import filter_epsilon
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

    def epsilon(self, spent: Sequence[Event], delta: float, accountant: str) -> float:
        """The claim at `delta`, for a ledger that holds `spent`."""
        if self.limit is not None:
            return filter_epsilon(*self.limit, delta)
        return accounting.epsilon([*spent, *self.unmade], delta, accountant)

    def text(self, released: int, planned: int | None) -> str:
        """What the claim counts, in sentences."""
        of_all = "" if planned is None else f"of {planned} planned "
        made = f"{released} {of_all}releases were made"
        if not released and not self.unmade:
            return "Nothing was released, and nothing is claimed for."
        if self.kind == AS_PLANNED:
            return f"All {planned} planned releases were made, and the claim is theirs."
        if self.kind == GUARD:
            return (
                f"{made}. The budget guard ended the run at a point that was fixed before the "
                "first lot, so the claim is that of the releases made."
            )
        if self.kind == PLANNED:
            return (
                f"{made}. Whoever stopped the run may have looked at what was released, so the "
                "claim keeps all planned releases, as far as a budget guard would have let them "
                "through: stopping early saves nothing."
            )
        if self.limit is not None:
            return (
                f"{made}. The claim is that of the Rényi filter which guarded the run, epsilon "
                f"{self.limit[0]:g} at delta {self.limit[1]:g}: it holds whatever was seen, and "
                "whenever the run stopped."
            )
        return (
            f"{made}, and their number was not planned. The claim holds if the decision to stop "
            "looked neither at releases nor at figures measured on them. Otherwise it is the "
            "max_epsilon of a budget guard; without one, plan the number first (steps=...)."
        )

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
