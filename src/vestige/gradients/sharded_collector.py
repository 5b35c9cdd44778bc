"""Clipped sums of parameters that are trained in shards.

A record's whole backward pass is on one rank, so that its norms need no message. When the pass is
over, every rank forms the sum of its rows for one whole parameter after the other, in the same
order on all ranks whatever has arrived, and the ranks add these up and keep their own parts: no
rank ever holds the sum of all parameters.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from vestige.geometry import Geometry
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector, DenseCollector, tie
from vestige.gradients.groups import Groups
from vestige.gradients.shards import is_sharded, own_groups
from vestige.gradients.together import Held


class ShardedCollector(Collector):
    """Clips what arrives; `total` is this rank's part of the sum over all ranks.

    `share` takes the sum of this rank's rows for a whole parameter to this rank's part of the sum
    of all ranks. `before_sharing` is called first: it charges the lot.
    """

    at_once = False
    sharded = True
    share: Callable[[Tensor], Tensor]
    before_sharing: Callable[[], None]

    def __init__(self, groups: Groups, clip: Clip) -> None:
        self._own = own_groups(groups)
        super().__init__(groups, clip, self._own.buffer())
        self._together = None  # sums are shared one parameter at a time

    def finish(self) -> None:
        """The backward pass is over: add up the lot's parameters over all ranks, one by one."""
        self.before_sharing()
        ready: dict[str, tuple[Held, Tensor]] = {}
        for held in map(tie, self._held.values()):
            factors = self._weights(held)
            ready |= {h.slot.name: (h, factors) for h in held}
        self._forget()
        for slot, own in zip(self.groups.slots, self._own.slots, strict=True):
            whole = self.total.new_zeros(slot.parameter.shape)
            if slot.name in ready:
                waited, factors = ready.pop(slot.name)
                waited.use.add_weighted(factors, whole)
            own.view(self.total).add_(self.share(whole))


def collector_of(groups: Groups, clip: Clip, geometry: Geometry | None) -> Collector:
    """What clips and adds up: for whole parameters, for shards, or for a geometry."""
    if geometry is not None:
        return DenseCollector(groups, clip, geometry)
    sharded = any(is_sharded(slot.parameter) for slot in groups.slots)
    return ShardedCollector(groups, clip) if sharded else Collector(groups, clip)
