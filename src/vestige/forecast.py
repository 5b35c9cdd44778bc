"""What the coming lots will be charged: public, and known before any of them is drawn.

The budget guard asks whether the next lot is still affordable, and the ledger file reserves blocks
of what is to come. Both would be right with a worse forecast: a guard that is surprised looks
again, and a charge that nobody foresaw is reserved by itself.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vestige.ledger import Event

if TYPE_CHECKING:
    from vestige.run import Run


def coming_events(run: Run, lots: int) -> list[Event]:
    """The charges of the next `lots` lots, beginning with the one that is about to be used."""
    return [event for event in itertools.islice(_charges(run), lots) if event is not None]


def lots_left(run: Run) -> int:
    """How many lots the plan still has; without a planned end, as many again as there were."""
    released, per_epoch = run.door.steps, run.plan.lots_per_epoch
    if run.plan.steps is None:
        return max(per_epoch, released)
    left = max(1, run.plan.steps - released)
    if run.lots.measure_by is not None:
        left += -(-left // per_epoch)  # all records are measured before every epoch
    return left


def _charges(run: Run) -> Iterator[Event | None]:
    """The charge of every lot from the coming one on; None where an earlier charge covers it."""
    step = run.door.steps
    for lot in itertools.count(run.coming_lot):
        if run.parts.importance and run.lots.measures(lot):
            paid = run.door.replays(f"measure {lot}")
            cost = run.door.measurement_cost(run.parts.importance.norm_noise)
            yield None if paid else cost
            continue
        if run.door.correlation:
            yield run.door.stretch_cost(lot, coming=lot == run.coming_lot)
        elif run.door.replays(f"release {step}"):
            yield None
        else:
            weight = math.sqrt(2) if run.passes and run.passes.whole_lots else 1.0
            yield run.door.cost(run.plan.rate_of(lot), weight * run.plan.beta_of(step), step)
        step += 1
