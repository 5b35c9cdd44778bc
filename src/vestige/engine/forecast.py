"""What the coming lots will be charged: public, and known before any of them is drawn.

The budget guard asks whether the next lot is still affordable, the ledger file reserves blocks of
what is to come, and a run that is stopped early claims what it had planned (ending.py). The first
two would be right with a worse forecast: a guard that is surprised looks again, and a charge that
nobody foresaw is reserved by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING

from vestige.privacy.ledger import Event

if TYPE_CHECKING:
    from vestige.engine.run import Run


def coming_events(run: Run, lots: int) -> list[Event]:
    """The charges of the next `lots` lots, beginning with the one that is about to be used."""
    return _events(run, run.position.lot, lots)


def events_ahead(run: Run, lots: int) -> list[Event]:
    """The charges of the next `lots` lots of a run that is not drawing one at the moment."""
    varies = run.plan.scheduled or run.survey or run.door.correlation
    if lots and not varies and not run.repeatable:
        return [replace(*coming_events(run, 1), count=lots)]  # all alike: no need to walk
    return _events(run, run.position.lot if run.in_lot else run.lots.next_lot, lots)


def _events(run: Run, first: int, lots: int) -> list[Event]:
    return [event for event in itertools.islice(_charges(run, first), lots) if event is not None]


def lots_left(run: Run) -> int:
    """How many lots the plan still has; without a planned end, as many again as there were."""
    released = run.door.steps
    if run.plan.steps is None:
        return max(run.plan.lots_per_epoch, released)
    return lots_until(run, max(released + 1, run.plan.steps))


def lots_until(run: Run, release: int) -> int:
    """How many lots it takes until so many releases are made."""
    left = max(0, release - run.door.steps)
    if run.lots.measured_in is not None:
        left += -(-left // run.plan.lots_per_epoch)  # all records are measured before every epoch
    return left


def _charges(run: Run, first: int) -> Iterator[Event | None]:
    """The charge of every lot from `first` on; None where an earlier charge covers it."""
    step = run.door.steps
    for lot in itertools.count(first):
        if run.survey and run.lots.measures(lot):
            paid = run.door.replays(f"measure {lot}")
            cost = run.door.measurement_cost(run.survey.norm_noise)
            yield None if paid else cost
            continue
        if run.door.correlation:
            yield run.door.stretch_cost(lot, coming=lot == first)
        elif run.door.replays(f"release {step}"):
            yield None
        else:
            weight = math.sqrt(2) if run.passes and run.passes.whole_lots else 1.0
            yield run.door.cost(run.plan.rate_of(lot), weight * run.plan.beta_of(step), step)
        step += 1
