"""Sums over ranks that hold a model's trained parameters in shards, and work that ranks divide."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from vestige.gradients.shards import dealt, is_sharded, own_part

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

    def divided(
        self,
        matrices: Sequence[Tensor],
        find: Callable[[Sequence[Tensor]], Sequence[float | None]],
    ) -> list[float | None]:
        """What `find` makes of every matrix: that of matrix i is the work of rank i % world.

        Every rank has the same bits of all, and a rank holds at most one whole matrix of shards.
        """
        world = self._ranks.world
        found = torch.zeros(len(matrices), dtype=torch.float64)
        step = world if any(map(is_sharded, matrices)) else max(1, len(matrices))
        for first in range(0, len(matrices), step):
            turn = range(len(matrices))[first : first + step]
            every = {i: self._at(i % world, matrices[i]) for i in turn}
            own = {i: whole for i, whole in every.items() if whole is not None}
            for i, number in zip(own, find(list(own.values())), strict=True):
                found[i] = math.nan if number is None else number
        with self._ranks.together("share what they found of the weights"):
            dist.all_reduce(found, group=self._ranks.cpu)
        return [None if math.isnan(number) else number for number in found.tolist()]

    def _at(self, rank: int, matrix: Tensor) -> Tensor | None:
        """The whole matrix, on one rank alone."""
        here = self._ranks.rank == rank
        if not is_sharded(matrix):
            return matrix.detach() if here else None
        own, count, world = own_part(matrix), len(matrix), self._ranks.world
        chunk = own.new_zeros(-(-count // world), *own.shape[1:])
        chunk[: len(own)] = own
        every = [torch.empty_like(chunk) for _ in range(world)] if here else None
        with self._ranks.together("gather a weight matrix"):
            dist.gather(chunk, every, group=self._ranks.group, group_dst=rank)
        return None if every is None else torch.cat(every)[:count]

    def total(self, numbers: Tensor) -> Tensor:
        """Add a few numbers up, in place."""
        with self._ranks.together("add up what they know of a release"):
            dist.all_reduce(numbers, group=self._ranks.group)
        return numbers
