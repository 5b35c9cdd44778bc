"""From the uses that one backward pass brings to the clipped sum of the lot.

A group whose parameters were used by one operation only is clipped and summed the moment its output
gradient arrives: nothing is kept. All others (every group under flat clipping, tied and reused
parameters) are held until the backward pass ends and then settled. Sums of the physical batches of
one lot add up in the same flat buffer.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.geometry import Geometry
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import Groups, Slot
from vestige.gradients.uses import PerExample, Tied, Use, row_squares


class ForwardRecord:
    """How many operations of one batch's forward passes used each group and each parameter."""

    def __init__(self) -> None:
        self.by_group: Counter[int] = Counter()
        self.by_slot: Counter[str] = Counter()

    def note(self, slots: Sequence[Slot]) -> None:
        """Count one operation that uses these parameters."""
        self.by_group.update({slot.group for slot in slots})
        self.by_slot.update(slot.name for slot in slots)


@dataclass
class _Held:
    """A use that waits for the end of the backward pass, with its norms where they are final."""

    slot: Slot
    use: Use
    square_norms: Tensor | None


class Collector:
    """Clips what arrives and adds it to `total`, the flat clipped sum. Private: holds raw sums."""

    in_pieces = True  # a large use may go through a few examples at a time

    def __init__(self, groups: Groups, clip: Clip) -> None:
        self.groups, self.clip = groups, clip
        self.total = groups.buffer()
        self._segments = {slot.name: slot.view(self.total) for slot in groups.slots}
        self._held: dict[int, list[_Held]] = defaultdict(list)
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

    def count_unclipped(self) -> None:
        """Keep the counts of quantile clipping from now on."""
        self.counts = torch.zeros(self.groups.count, dtype=torch.float64, device=self.total.device)

    def clear(self) -> None:
        """Start the next lot from zero."""
        self.total.zero_()
        self._held.clear()
        if self.counts is not None:
            self.counts.zero_()
        if self.norms is not None:
            self.norms.clear()

    def begin(self, scale: float) -> None:
        """A backward pass begins; `scale` undoes a mean over the batch's rows."""
        if not self.holding:
            self._held.clear()
        self._scale = scale

    def arrive(self, record: ForwardRecord, uses: Sequence[tuple[Slot, Use]]) -> None:
        """One operation's output gradient has come; `uses` are its parameters' gradients."""
        for group in {slot.group for slot, _ in uses}:
            members = [(slot, use) for slot, use in uses if slot.group == group]
            if self.holding:
                self._held[group] += [_Held(slot, use, None) for slot, use in members]
                continue
            if record.by_group[group] == 1:
                self._settle_at_once(members)
                continue
            for slot, use in members:
                # Norms are taken while the gradient is in the cache, unless more uses follow.
                use.summed_with(self._rounding())
                norms = use.square_norms() if record.by_slot[slot.name] == 1 else None
                self._held[group].append(_Held(slot, use, norms))

    def add(self, gradients: Tensor, scale: float) -> None:
        """Clip and add the gradients of a batch that are at hand as rows (n, P) of numbers."""
        self.begin(scale)
        for slot in self.groups.slots:
            part = gradients[:, slot.start : slot.stop].reshape(-1, *slot.parameter.shape)
            self._held[slot.group].append(_Held(slot, PerExample(part), None))
        self.finish()

    def finish(self) -> None:
        """The backward pass is over: settle what was held, unless another pass is to come."""
        while self._held and not self.holding:
            _, held = self._held.popitem()
            self._settle(_tie(held))

    def _settle_at_once(self, members: Sequence[tuple[Slot, Use]]) -> None:
        """A group used by one operation: a large use goes through a few examples at a time."""
        small = [(slot, use) for slot, use in members if isinstance(use, PerExample)]
        large = [(slot, use) for slot, use in members if not isinstance(use, PerExample)]
        pieces = large[0][1].pieces() if self.in_pieces and len(large) == 1 else None
        if pieces is None:
            self._settle([_Held(slot, use, None) for slot, use in members])
            return
        for rows, piece in pieces:
            some = [_Held(slot, PerExample(use.values[rows]), None) for slot, use in small]
            self._settle([*some, _Held(large[0][0], piece, None)])

    def _settle(self, held: list[_Held]) -> None:
        square_norms: Tensor | None = None
        for h in held:
            if h.square_norms is None:
                h.use.summed_with(self._rounding())
            part = h.use.square_norms() if h.square_norms is None else h.square_norms
            square_norms = part if square_norms is None else square_norms + part
        assert square_norms is not None
        group, dtype = held[0].slot.group, self.total.dtype
        self._look(square_norms, group)
        most = self.clip.most_square(group, dtype)
        # On a GPU looking would stall the device, and dropping nothing is cheap there.
        if square_norms.device.type != "cpu" or not float(square_norms.sum()) <= most:
            bad = ~(square_norms <= most)  # also what is not a number
            square_norms = square_norms.masked_fill(bad, 0)
            for h in held:
                h.use.drop(bad)
        factors = self.clip.factors(square_norms, group, self._scale, dtype, self._rounding())
        for h in held:
            h.use.add_weighted(factors, self._segments[h.slot.name])

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
        """The relative rounding error of a weighted sum: much larger where TF32 is allowed."""
        single = self.total.device.type == "cuda" and self.total.dtype == torch.float32
        if single and (torch.backends.cudnn.allow_tf32 or torch.backends.cuda.matmul.allow_tf32):
            return 2.0**-9
        return 4 * torch.finfo(self.total.dtype).eps


def _tie(held: list[_Held]) -> list[_Held]:
    """One entry per parameter: several uses of one become their sum."""
    by_slot: dict[str, list[_Held]] = defaultdict(list)
    for h in held:
        by_slot[h.slot.name].append(h)
    return [
        uses[0] if len(uses) == 1 else _Held(uses[0].slot, Tied([h.use for h in uses]), None)
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
        self.total = self.total.new_zeros(geometry.size)

    @property
    def bounds(self) -> tuple[float, ...]:
        """The l2 bound of one example's part in each segment of the release."""
        return self._geometry.bounds(self.clip.bounds[0])

    def arrive(self, record: ForwardRecord, uses: Sequence[tuple[Slot, Use]]) -> None:
        """Hold everything until the backward pass is over."""
        self._held[0] += [_Held(slot, use, None) for slot, use in uses]

    def _settle(self, held: list[_Held]) -> None:
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

    def _rows(self, held: list[_Held]) -> Tensor:
        """The gradients, an example in each row."""
        dense = [(h.slot, h.use.dense()) for h in held]
        rows = self.total.new_zeros(len(dense[0][1]), self.groups.size)
        for slot, values in dense:
            rows[:, slot.start : slot.stop] += values.reshape(len(values), -1)
        return rows
