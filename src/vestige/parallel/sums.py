"""Sums over ranks that hold a model's trained parameters in shards."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vestige.gradients.shards import dealt

if TYPE_CHECKING:
    from vestige.parallel.ranks import Ranks

# torch 2.13 has a new name for it, and warns of the old one.
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Sums:
    """Adds up what the ranks have, each rank getting what it holds of it."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def share(self, whole: Tensor) -> Tensor:
        """This rank's rows of the sum of a whole parameter over all ranks."""
        world, count = self._ranks.world, len(whole)
        chunk = -(-count // world)
        if chunk * world > count:
            filling = whole.new_zeros(chunk * world - count, *whole.shape[1:])
            whole = torch.cat([whole, filling])
        own = whole.new_empty(chunk, *whole.shape[1:])
        with self._ranks.together("add up their clipped sums"):
            _reduce_scatter(own, whole, group=self._ranks.group)
        first, last = dealt(count, world, self._ranks.rank)
        return own[: last - first]

    def total(self, numbers: Tensor) -> Tensor:
        """Add a few numbers up, in place."""
        with self._ranks.together("add up what they know of a release"):
            dist.all_reduce(numbers, group=self._ranks.group)
        return numbers
