"""What a run of a sharded model does more: its ranks meet before every pass, and share sums."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vestige.gradients.sharded_collector import ShardedCollector
from vestige.parallel.meetings import Meetings
from vestige.parallel.sums import Sums

if TYPE_CHECKING:
    from vestige.engine.run import Run


def connect(run: Run) -> None:
    """Let the passes of a sharded model speak with the other ranks; nothing for a whole one."""
    capture, collector = run.capture, run.capture.collector
    if run.ranks.group and capture.shards.passing:
        capture.meet = Meetings(run.ranks, run.position)
        capture.passing = run.ranks.passing
    if isinstance(collector, ShardedCollector):
        collector.share = Sums(run.ranks).share
        # The lot is charged before the first of its sums is shared.
        collector.before_sharing = lambda: run.door.pay_ahead(run.charge_lot)
