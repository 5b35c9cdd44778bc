"""Many groups clipped and added at a time: on a GPU every operation has to be launched.

A group's norms, factors and sums are rows of matrices over all groups (g, n), and small gradients
(biases, norm layers) of one size are one tensor (k, n, m). Each row is computed by itself, so that
the numbers are those of one group after the other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.gradients.groups import Slot
from vestige.gradients.uses import PerExample, Use


@dataclass
class Held:
    """A use that waits to be clipped, with its norms where they are final."""

    slot: Slot
    use: Use
    square_norms: Tensor | None

    def take_norms(self, rounding: float) -> Tensor:
        """The squared norms, taken now if they were not yet."""
        if self.square_norms is None:
            self.use.summed_with(rounding)
            self.square_norms = self.use.square_norms()
        return self.square_norms


@dataclass
class _Stack:
    """Small gradients of one size, (k, n, m), and the groups that they belong to."""

    values: Tensor
    held: list[Held]
    groups: list[int]


class Together:
    """Settles groups, each a list of uses that are clipped by one factor for every example."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._indices: dict[tuple[int, ...], Tensor] = {}

    def settle(
        self,
        groups: Sequence[Sequence[Held]],
        clip: Callable[[Tensor], Tensor],
        segments: Mapping[str, Tensor],
    ) -> None:
        """Add every use to its segment of the sum.

        `clip` makes factors (g, n) of squared norms (g, n): zero for an example that drops out.
        Norms of uses that are not small must have been taken.
        """
        stacks = _stacks(groups)
        factors = clip(self._square_norms(groups, stacks))
        single = {id(stack.held[0]) for stack in stacks if len(stack.held) == 1}
        by_group = zip(groups, factors.unbind(0), (factors == 0).unbind(0), strict=True)
        for held, factor, dropped in by_group:
            for h in held:
                if not h.use.small or id(h) in single:
                    h.use.drop(dropped)
                    h.use.add_weighted(factor, segments[h.slot.name])
        for stack in stacks:
            if len(stack.held) == 1:
                continue
            weights = factors.index_select(0, self._index(stack.groups)).unsqueeze(2)
            # A factor of zero times what is not finite would not be zero.
            sums = torch.where(weights == 0, 0, stack.values * weights).sum(1)
            into = [segments[h.slot.name].view(-1) for h in stack.held]
            torch._foreach_add_(into, list(sums.unbind(0)))

    def _square_norms(self, groups: Sequence[Sequence[Held]], stacks: list[_Stack]) -> Tensor:
        """The squared norms of every group, (g, n), in float64."""
        blocks, owners = [], []
        for stack in stacks:
            known = [h.square_norms for h in stack.held if h.square_norms is not None]
            if len(known) == len(stack.held):
                blocks += [norms.unsqueeze(0) for norms in known]
            else:
                norms = torch.linalg.vector_norm(stack.values, dim=2, dtype=torch.float64)
                blocks.append(norms.square_())
            owners += stack.groups
        large = [
            (i, h.square_norms)
            for i, held in enumerate(groups)
            for h in held
            if not h.use.small and h.square_norms is not None
        ]
        blocks += [norms.unsqueeze(0) for _, norms in large]
        owners += [i for i, _ in large]
        every = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
        return every.sum(0, keepdim=True) if len(groups) == 1 else self._by_group(every, owners)

    def _by_group(self, every: Tensor, owners: Sequence[int]) -> Tensor:
        """Rows added up that belong to one group: the first of each, then the second, ..."""
        members: dict[int, list[int]] = defaultdict(list)
        for place, group in enumerate(owners):
            members[group].append(place)
        first = [members[group][0] for group in range(len(members))]
        squares = every.index_select(0, self._index(first))
        for rank in range(1, max(map(len, members.values()))):
            some = [group for group in range(len(members)) if len(members[group]) > rank]
            rows = every.index_select(0, self._index([members[group][rank] for group in some]))
            squares.index_add_(0, self._index(some), rows)
        return squares

    def _index(self, numbers: Sequence[int]) -> Tensor:
        """The numbers on the device: copied once, not in every step."""
        key = tuple(numbers)
        if key not in self._indices:
            self._indices[key] = torch.tensor(key).to(self._device, non_blocking=True)
        return self._indices[key]


def _stacks(groups: Sequence[Sequence[Held]]) -> list[_Stack]:
    by_size: dict[tuple[int, torch.dtype], list[tuple[int, Held, Tensor]]] = defaultdict(list)
    for i, held in enumerate(groups):
        for h in held:
            if isinstance(h.use, PerExample):
                values = h.use.values.flatten(1) if h.use.values.ndim > 1 else h.use.values[:, None]
                by_size[values.shape[1], values.dtype].append((i, h, values))
    return [
        _Stack(
            torch.stack([v for _, _, v in same]) if len(same) > 1 else same[0][2].unsqueeze(0),
            [h for _, h, _ in same],
            [i for i, _, _ in same],
        )
        for same in by_size.values()
    ]
