"""From the uses that one backward pass brings to the clipped sum of the lot.

A group whose parameters were used by one operation only is clipped and summed the moment its output
gradient arrives: nothing is kept. All others (every group under flat clipping, tied and reused
parameters) are held until the backward pass ends and then settled. On a GPU groups wait for each
other and are settled many at a time. Sums of the physical batches of one lot add up in the same
flat buffer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import torch
from torch import Tensor

from vestige.geometry import Geometry
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import Groups, Slot
from vestige.gradients.precision import factor_rounding
from vestige.gradients.together import Held, Together
from vestige.gradients.uses import PerExample, Tied, Use, row_squares

WAITING_BYTES = 2**30  # of gradients that wait for others on a GPU


class ForwardRecord:
    """How many operations of one batch's forward passes used each group and each parameter."""

    def __init__(self) -> None:
        self.by_group: Counter[int] = Counter()
        self.by_slot: Counter[str] = Counter()

    def note(self, slots: Sequence[Slot]) -> None:
        """Count one operation that uses these parameters."""
        self.by_group.update({slot.group for slot in slots})
        self.by_slot.update(slot.name for slot in slots)


class Collector:
    """Clips what arrives and adds it to `total`, the flat clipped sum. Private: holds raw sums."""

    in_pieces = True  # a large use may go through a few examples at a time
    once = True  # a batch's graph is gone through once: then nothing of it is kept
    at_once = True  # a group that is complete need not wait for the others
    sharded = False  # `total` is this process's part of the sum of all processes

    def __init__(self, groups: Groups, clip: Clip, total: Tensor | None = None) -> None:
        self.groups, self.clip = groups, clip
        self.total = groups.buffer() if total is None else total
        self._segments = (
            {slot.name: slot.view(self.total) for slot in groups.slots} if total is None else {}
        )
        self._held: dict[int, list[Held]] = defaultdict(list)
        self._complete: list[list[Held]] = []  # groups that only wait for each other
        self._waiting = 0  # bytes
        self._together = Together(self.total.device) if self.total.is_cuda else None
        self._scale = 1.0
        # Of quantile clipping: sum_i (1[|g_i| <= C] - 1/2) in each group, over all g_i != 0.
        self.counts: Tensor | None = None
        # Of methods that are not private: the raw norms of the lot.
        self.norms: list[float] | None = None
        self.holding = False  # two passes over the batch make one gradient: settle after both

    @property
    def bounds(self) -> tuple[float, ...]:
        """The l2 bound of one example's part in each group of `total`."""
        return self.clip.bounds

    def keep_in(self, buffer: Tensor) -> None:
        """Have `total` in this memory from now on."""
        self.total = buffer
        if buffer.numel() == self.groups.size:
            self._segments = {slot.name: slot.view(buffer) for slot in self.groups.slots}

    def count_unclipped(self) -> None:
        """Keep the counts of quantile clipping from now on."""
        self.counts = torch.zeros(self.groups.count, dtype=torch.float64, device=self.total.device)

    def clear(self) -> None:
        """Start the next lot from zero."""
        self.total.zero_()
        self._forget()
        if self.counts is not None:
            self.counts.zero_()
        if self.norms is not None:
            self.norms.clear()

    def begin(self, scale: float) -> None:
        """A backward pass begins; `scale` undoes a mean over the batch's rows."""
        if not self.holding:
            self._forget()
        self._scale = scale

    def _forget(self) -> None:
        self._held.clear()
        self._complete, self._waiting = [], 0

    def arrive(self, record: ForwardRecord, uses: Sequence[tuple[Slot, Use]]) -> None:
        """One operation's output gradient has come; `uses` are its parameters' gradients."""
        for group in {slot.group for slot, _ in uses}:
            members = [Held(slot, use, None) for slot, use in uses if slot.group == group]
            once = all(record.by_slot[h.slot.name] == 1 for h in members)  # no parameter twice
            alone = self.at_once and record.by_group[group] == 1 and once
            if self.holding:
                self._held[group] += members
                continue
            if alone and not self._together:
                self._settle_at_once(members)
                continue
            for h in members:
                # Norms are taken while the gradient is in the cache, unless more uses follow; those
                # of small gradients that will be settled together are taken together.
                late = self._together and isinstance(h.use, PerExample) and h.use.squares is None
                if record.by_slot[h.slot.name] == 1 and not late:
                    h.take_norms(self._rounding())
            if alone:
                self._wait(members)
                continue
            for h in members:
                h.use.wait()
            self._held[group] += members

    def add(self, gradients: Tensor, scale: float) -> None:
        """Clip and add the gradients of a batch that are at hand as rows (n, P) of numbers."""
        self.begin(scale)
        for slot in self.groups.slots:
            part = gradients[:, slot.start : slot.stop].reshape(-1, *slot.parameter.shape)
            self._held[slot.group].append(Held(slot, PerExample(part), None))
        self.finish()

    def finish(self) -> None:
        """The backward pass is over: settle what was held, unless another pass is to come."""
        if self.holding:
            return
        if self._together:
            groups = [*self._complete, *map(tie, self._held.values())]
            self._forget()
            self._settle_together(groups)
        while self._held:
            _, held = self._held.popitem()
            self._settle(tie(held))

    def _wait(self, held: list[Held]) -> None:
        """Keep a group that is complete until others are, or until too much waits."""
        self._complete.append(held)
        self._waiting += sum(h.use.nbytes for h in held)
        if self._waiting > WAITING_BYTES:
            groups, self._complete, self._waiting = self._complete, [], 0
            self._settle_together(groups)

    def _settle_together(self, groups: list[list[Held]]) -> None:
        if not groups or self._together is None:
            return
        for h in (h for held in groups for h in held if not h.use.small):
            h.take_norms(self._rounding())
        numbers = [held[0].slot.group for held in groups]

        def clip(square_norms: Tensor) -> Tensor:
            rows = list(zip(square_norms.unbind(0), numbers, strict=True))
            for row, group in rows:
                self._look(row, group)
            if len({self.clip.bounds[group] for group in numbers}) == 1:
                return self._factors(square_norms, numbers[0])
            return torch.stack([self._factors(row, group) for row, group in rows])

        self._together.settle(groups, clip, self._segments)

    def _factors(self, square_norms: Tensor, group: int) -> Tensor:
        """Factors with the bound of `group`, zero for an example that drops out."""
        dtype = self.total.dtype
        bad = ~(square_norms <= self.clip.most_square(group, dtype))  # also what is not a number
        kept = square_norms.masked_fill(bad, 0)
        factors = self.clip.factors(kept, group, self._scale, dtype, self._rounding())
        return factors.masked_fill_(bad, 0)

    def _settle_at_once(self, members: Sequence[Held]) -> None:
        """A group used by one operation: a large use goes through a few examples at a time."""
        large = [h for h in members if not isinstance(h.use, PerExample)]
        pieces = large[0].use.pieces() if self.in_pieces and len(large) == 1 else None
        if pieces is None:
            self._settle(members)
            return
        for rows, piece in pieces:
            some = [
                Held(h.slot, PerExample(h.use.values[rows]), None)
                for h in members
                if isinstance(h.use, PerExample)
            ]
            self._settle([*some, Held(large[0].slot, piece, None)])

    def _settle(self, held: Sequence[Held]) -> None:
        factors = self._weights(held)
        for h in held:
            h.use.add_weighted(factors, self._segments[h.slot.name])

    def _weights(self, held: Sequence[Held]) -> Tensor:
        """The factors of one group's examples, from the norms of all its uses."""
        square_norms = held[0].take_norms(self._rounding())
        for h in held[1:]:
            square_norms = square_norms + h.take_norms(self._rounding())
        group, dtype = held[0].slot.group, self.total.dtype
        self._look(square_norms, group)
        most = self.clip.most_square(group, dtype)
        if not float(square_norms.sum()) <= most:
            bad = ~(square_norms <= most)  # also what is not a number
            square_norms = square_norms.masked_fill(bad, 0)
            for h in held:
                h.use.drop(bad)
        return self.clip.factors(square_norms, group, self._scale, dtype, self._rounding())

    def _look(self, square_norms: Tensor, group: int) -> None:
        """Count the examples within the bound, and keep the norms, where that is wanted."""
        if self.counts is None and self.norms is None:
            return
        norms = square_norms.sqrt() * self._scale
        if self.counts is not None:
            within = norms <= self.clip.bounds[group]  # what is not finite is not
            # A record without a gradient counts for nothing: zeroed out or removed, it is the same.
            self.counts[group] += within.sum() - 0.5 * (len(norms) + (norms == 0).sum())
        if self.norms is not None:
            self.norms += norms[norms.isfinite()].tolist()

    def _rounding(self) -> float:
        """The relative rounding error of a weighted sum: much larger where factors are rounded."""
        single = self.total.dtype == torch.float32
        coarse = factor_rounding(self.total.device) if single else 0.0
        return max(coarse, 4 * torch.finfo(self.total.dtype).eps)


def tie(held: list[Held]) -> list[Held]:
    """One entry per parameter: several uses of one become their sum."""
    by_slot: dict[str, list[Held]] = defaultdict(list)
    for h in held:
        by_slot[h.slot.name].append(h)
    return [
        uses[0] if len(uses) == 1 else Held(uses[0].slot, Tied([h.use for h in uses]), None)
        for uses in by_slot.values()
    ]


class DenseCollector(Collector):
    """Adds up what a geometry makes of whole gradients, held as rows of (n, P).

    Guarantee: each row's contribution is bounded by the geometry, whatever the row; rows that are
    not finite contribute nothing.
    """

    def __init__(self, groups: Groups, clip: Clip, geometry: Geometry) -> None:
        super().__init__(groups, clip)
        self._geometry = geometry
        self._together = None  # whole gradients are one group
        self.total = self.total.new_zeros(geometry.size)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The l2 bound of one example's part in each segment of the release."""
        return self._geometry.bounds(self.clip.bounds[0])

    def arrive(self, record: ForwardRecord, uses: Sequence[tuple[Slot, Use]]) -> None:
        """Hold everything until the backward pass is over."""
        self._held[0] += [Held(slot, use, None) for slot, use in uses]

    def _settle(self, held: Sequence[Held]) -> None:
        rows = self._rows(held)
        square_norms = row_squares(rows)
        self._look(square_norms, 0)
        bad = ~(square_norms <= self.clip.most_square(0, rows.dtype))
        rows.masked_fill_(bad[:, None], 0)
        square_norms = square_norms.masked_fill(bad, 0)
        rounding = self._rounding()
        factors = self.clip.factors(square_norms, 0, self._scale, torch.float64, rounding)
        lengths = (square_norms.sqrt() * factors).masked_fill_(square_norms == 0, 0)
        self.total += self._geometry.contribution(rows, lengths, self.clip.bounds[0])

    def _rows(self, held: Sequence[Held]) -> Tensor:
        """The gradients, an example in each row."""
        dense = [(h.slot, h.use.dense()) for h in held]
        rows = self.total.new_zeros(len(dense[0][1]), self.groups.size)
        for slot, values in dense:
            rows[:, slot.start : slot.stop] += values.reshape(len(values), -1)
        return rows
