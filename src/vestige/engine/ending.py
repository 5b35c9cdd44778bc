"""How a run would end if it stopped now: what is left of its plan, and what its guard allows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vestige.engine.forecast import events_ahead, lots_until
from vestige.privacy.ending import AS_PLANNED, FILTER, GUARD, OPEN, PLANNED, Ending
from vestige.privacy.ledger import merge

if TYPE_CHECKING:
    from vestige.engine.run import Run


def ending(run: Run) -> Ending:
    """How `run` has ended if it stops here, between two lots."""
    return stopped(run) if run.door.own.steps else Ending(AS_PLANNED)


def stopped(run: Run) -> Ending:
    """The same for a run that may release more before it stops, such as one that is killed."""
    plan, guard = run.plan, run.guard
    if run.door.steps == plan.steps:
        return Ending(AS_PLANNED)
    planned = plan.steps is not None and run.door.steps < plan.steps
    lots = lots_until(run, plan.steps) if planned and plan.steps else 1
    if guard and guard.filters and not guard.passes_filter(run.door.ledger.merged()):
        guard = None  # engines without it have spent more than it allows: it bounds nothing
    fits = guard.affordable(lots) if guard else lots
    if guard and guard.filters and not (planned and fits == lots):
        return Ending(FILTER, limit=(guard.max_epsilon, guard.delta))
    if not fits:
        return Ending(GUARD)
    return Ending(PLANNED, merge(events_ahead(run, fits))) if planned else Ending(OPEN)
