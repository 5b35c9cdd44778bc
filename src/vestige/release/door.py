"""The door: the one place where noise is added and private data becomes public.

    release = gain * clipped sum + branch + noise,   noise ~ N(0, std_g^2) on every coordinate of g

The clipped sum is private, the branch a function of earlier releases and of the weights, gain
(beta) and the noise multipliers public; std_g follows from them and from the bounds that the sum
was clipped with. The ledger is charged before the noise is drawn. Nothing else constructs a
`Release`, and everything that comes after (history, memory, optimizers, reports) takes only
`Release` objects, so an un-noised sum cannot get there.

Guarantee: given everything released before, a release is a Gaussian mechanism on the lot with
noise multiplier sigma/gain relative to the clipped sum's sensitivity (Abadi et al. 2016, arXiv
1607.00133; with memory, FO-DP-SGD arXiv 2605.09890 and SMA-DP-SGD arXiv 2605.20450). What is let
out beside the sum (the counts of quantile clipping, a first look at the same lot) is part of the
same charge. Correlated noise is charged by its own schedule: see correlation.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vestige.errors import PrivacyError
from vestige.gradients.groups import Groups
from vestige.privacy.accounting import Charge
from vestige.privacy.ledger import Event, Facts, Ledger, Spending
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.digests import compare_or_note
from vestige.release.observer import Observer, Passage
from vestige.release.query import Branch, ClippedSum, Position, check_query, recalled
from vestige.sampling.streams import COUNTS, FIRST_LOOK, MEASURE, NOISE, Randomness

if TYPE_CHECKING:
    from vestige.privacy.ledger_file import Account
    from vestige.release.correlation import Correlation

__all__ = ["Branch", "ClippedSum", "Distortion", "Door", "Position", "Release", "recalled"]

_RELEASED = object()  # proves that a Release came out of the door: it never leaves this module

# A mechanism that is not additive: from a sum, noise of standard deviation sigma and the clip
# bounds to what is let out. Only methods that are published as private and are not have one.
Distortion = Callable[[Tensor, Tensor, tuple[float, ...]], Tensor]


class Release:
    """A noisy sum: public, free to use and to publish. Only a `Door` makes one.

    Its values are readable until the next release: whoever keeps them longer (a history) copies.
    `stds` are the standard deviations of its noise in each group, `counts` the noisy centred counts
    of quantile clipping, if there are any.
    """

    __slots__ = ("_door", "_values", "counts", "stds", "step")

    def __init__(
        self,
        values: Tensor,
        step: int,
        door: Door | None = None,
        stds: tuple[float, ...] = (),
        counts: tuple[float, ...] | None = None,
        *,
        _certificate: object = None,
    ) -> None:
        if _certificate is not _RELEASED:
            raise TypeError(
                "a Release can only come out of Door.release: it certifies that noise was added "
                "and the ledger was charged."
            )
        self._values, self.step, self._door = values, step, door
        self.stds, self.counts = stds, counts

    @property
    def values(self) -> Tensor:
        """The noisy sum, flat."""
        assert self._door is not None
        if self._door.steps != self.step + 1:
            raise RuntimeError("this release's values were overwritten by the next: copy to keep")
        return self._values


class Door:
    """Turns clipped sums into releases, one ledger charge and one noise draw for each.

    `noise` is the scale of every step, or one per step, the last of which holds beyond.
    `count_noise` is the standard deviation of the noise on the counts of quantile clipping. With
    `distortion` the mechanism is one that is not private, and every charge is at multiplier 0; so
    it is with `private=False`, for methods that leak elsewhere. `observers` see what goes through.
    """

    def __init__(
        self,
        groups: Groups,
        noise: NoiseScale | Sequence[NoiseScale],
        randomness: Randomness,
        ledger: Ledger,
        *,
        segments: Sequence[slice] | None = None,
        count_noise: float | None = None,
        correlation: Correlation | None = None,
        distortion: Distortion | None = None,
        private: bool = True,
        run: str = "",
        facts: Facts | None = None,
        position: Position | None = None,
    ) -> None:
        self.scales = (noise,) if isinstance(noise, NoiseScale) else tuple(noise)
        self.randomness, self.ledger, self.groups = randomness, ledger, groups
        self.segments = groups.segments() if segments is None else list(segments)
        self.observers: list[Observer] = []
        self.count_noise, self.correlation = count_noise, correlation
        self._distortion = distortion
        self._private = private and distortion is None
        self._buffer: Tensor | None = None
        self._first_look: Tensor | None = None
        self._paid = False  # the charge of a first look covers the release that follows it
        self._last_look = -1  # the last lot that had a first look
        self.position = Position() if position is None else position
        self.run = run  # the name of this run on the ledger
        self.session = run  # that of this engine: a run that goes on keeps its name, not its engine
        self.facts = facts or Facts()
        self.own = Ledger()  # the charges of this run alone
        self.account: Account | None = None  # where the ledger has a file
        self.lost = 0  # how many of the own charges paid for releases that a crash has lost

    @property
    def steps(self) -> int:
        """The number of releases so far."""
        return self.position.release

    @property
    def last(self) -> list[Tensor]:
        """The values of the last release, if there is one."""
        return [] if self._buffer is None else [self._buffer]

    @property
    def noise(self) -> NoiseScale:
        """The noise of the next release."""
        return self.scales[min(self.steps, len(self.scales) - 1)]

    @property
    def _beside(self) -> float:
        """The inverse multiplier of the counts: one record moves each of them by 1/2."""
        if self.count_noise is None:
            return 0.0
        sensitivity = math.sqrt(self.groups.count) / 2
        return sensitivity / self.count_noise if self.count_noise else math.inf

    def charge(self, sample_rate: float, gain: float = 1.0, lot: int | None = None) -> None:
        """Write the cost of one release of a lot drawn with `sample_rate` into the ledger."""
        if self._paid:
            self._paid = False
        elif self.correlation is None:
            self._write(self.cost(sample_rate, gain, self.steps))
        else:
            assert lot is not None and gain == 1
            if (due := self.correlation.due(lot)) is not None:
                self._write(self._event(due, self.steps))
                self.correlation.paid(lot)

    def pay_ahead(self, charge: Callable[[], None]) -> None:
        """Charge a lot before its release, which is then paid: somebody else must count it now."""
        if not self._paid and not self.replays(f"release {self.steps}"):
            charge()
            self._paid = True

    def cost(self, sample_rate: float, weight: float, step: int) -> Event:
        """What the ledger is charged for release `step` of a lot drawn with `sample_rate`."""
        return self._event(Charge(sample_rate, weight, self._beside), step)

    def stretch_cost(self, lot: int, coming: bool) -> Event | None:
        """What correlated noise is charged for at `lot`; `coming`: no lot before it is due."""
        assert self.correlation is not None
        due = self.correlation.due(lot) if coming else self.correlation.begins(lot)
        return None if due is None else self._event(due, self.steps)

    def _event(self, charge: Charge, step: int) -> Event:
        event = charge.event(self.scales[min(step, len(self.scales) - 1)].joint)
        leaks = not self._private or charge.beside == math.inf
        return Event(event.sample_rate, 0.0) if leaks else event

    def _write(self, event: Event) -> None:
        self.ledger.spends(self.session, self.run, Spending(self.facts, self.own))
        self.ledger.charge(event.sample_rate, event.noise_multiplier, self.account)
        self.own.charge(event.sample_rate, event.noise_multiplier)
        self.ledger.pending.pop(self.run, None)
        for observer in self.observers:
            observer.charged(event)

    def release(
        self,
        clipped: ClippedSum,
        sample_rate: float,
        branch: Branch | None = None,
        gain: float = 1.0,
        lot: int | None = None,
    ) -> Release:
        """Charge the ledger, draw the noise of this step, and let the noisy sum out.

        `lot` is the lot's number, which correlated noise goes by.
        """
        check_query(clipped, branch, self.steps)
        passage = self._arrives("release", clipped, lot, gain, branch)
        before = self._released_before(f"release {self.steps}")
        if before is None or self._paid or self.correlation is not None:
            self.charge(sample_rate, gain, lot)
        else:
            self._found_again()
        clipped.complete()
        self._draws(passage)
        total, stds = clipped._values, self.noise.stds(clipped.bounds)
        if self._buffer is None:
            self._buffer = torch.empty_like(total)  # a fresh one for every step costs page faults
        values = self._buffer
        if self._distortion is not None:
            noise = torch.empty_like(total)
            for block, part in self.randomness.normal_blocks(total, self.steps):
                noise[block] = part
            values.copy_(self._distortion(total, noise.mul_(self.noise.joint), clipped.bounds))
        elif self.correlation is not None:
            assert lot is not None
            noise, scale = self.correlation.noise(lot), self.correlation.marginal(lot)
            for at, std in zip(self.segments, stds, strict=True):
                torch.add(total[at], noise[at], alpha=std, out=values[at])
            stds = tuple(std * scale for std in stds)
        else:
            self._add(total, branch, gain, self._noise(total, stds, NOISE, self.steps), values)
        counts = self._noisy_counts(clipped)
        self._remember(f"release {self.steps}", before, values, counts)
        self.position.release += 1
        counts = self._leaves(passage, values, stds, counts)
        return Release(values, self.steps - 1, self, stds, counts, _certificate=_RELEASED)

    def first_look(self, clipped: ClippedSum, sample_rate: float, lot: int) -> Release:
        """A noisy sum of a lot that will be released once more: the pair is charged here, once.

        Both looks have noise of this step's scale; together they are one Gaussian release of the
        lot at sigma / sqrt(2). The values are readable until the release. The noise goes by the
        lot's number, not by the step's, which a lot that is given up does not advance.
        """
        check_query(clipped, None, self.steps)
        if lot <= self._last_look:
            raise PrivacyError(
                f"lot {lot} was looked at before: the same noise would be added to another sum. "
                "Call engine.abandon_lot() and go on with the next batch."
            )
        passage = self._arrives("first look", clipped, lot)
        self._last_look = lot
        self._paid = False
        before = self._released_before(f"first look {lot}")
        if before is None:
            self._write(self.cost(sample_rate, math.sqrt(2), self.steps))
        else:
            self._found_again()
        self._paid = True
        clipped.complete()
        self._draws(passage)
        if self._first_look is None:
            self._first_look = torch.empty_like(clipped._values)
        stds = self.noise.stds(clipped.bounds)
        noise = self._noise(clipped._values, stds, FIRST_LOOK, lot)
        self._add(clipped._values, None, 1.0, noise, self._first_look)
        self._remember(f"first look {lot}", before, self._first_look)
        self._leaves(passage, self._first_look, stds)
        return Release(self._first_look, self.steps - 1, self, stds, _certificate=_RELEASED)

    def measurement_cost(self, multiplier: float) -> Event:
        """What the ledger is charged for one number of the whole data."""
        return Event(1.0, multiplier if self._private else 0.0)

    def charge_measurement(self, multiplier: float) -> None:
        """Write the cost of one number of the whole data into the ledger."""
        if not self._paid:
            self._write(self.measurement_cost(multiplier))
        self._paid = False

    def measure(self, number: ClippedSum, multiplier: float, lot: int) -> float:
        """A noisy number of the whole data, to which one record adds at most its bound."""
        exact, (bound,) = number._values, number.bounds
        passage = self._arrives("measurement", number, lot)
        before = self._released_before(f"measure {lot}")
        if before is None:
            self.charge_measurement(multiplier)
        else:
            self._found_again()
        number.complete()
        self._draws(passage)
        noisy = exact + multiplier * bound * float(self.randomness.normals(MEASURE, lot, 1)[0])
        self._remember(f"measure {lot}", before, noisy)
        self._leaves(passage, noisy, (multiplier * bound,))
        return float(noisy)

    def _arrives(
        self,
        kind: str,
        clipped: ClippedSum,
        lot: int | None,
        gain: float = 1.0,
        branch: Branch | None = None,
    ) -> Passage | None:
        """Tell the observers what is about to be released: nobody in ordinary runs."""
        if not self.observers:
            return None
        mixed = None if branch is None else branch.values
        total, counts, number = clipped._values, clipped._counts, -1 if lot is None else lot
        passage = Passage(kind, number, self.steps, gain, clipped.bounds, total, mixed, counts)
        for observer in self.observers:
            observer.arrives(passage)
        return passage

    def _draws(self, passage: Passage | None) -> None:
        if passage is not None:
            for observer in self.observers:
                observer.drawing(passage)

    def _leaves(
        self,
        passage: Passage | None,
        values: Tensor,
        stds: tuple[float, ...],
        counts: tuple[float, ...] | None = None,
    ) -> tuple[float, ...] | None:
        """Tell the observers what is let out; the noisy counts, which a replay may have changed."""
        if passage is None:
            return counts
        passage.values, passage.stds, passage.noisy_counts = values, stds, counts
        for observer in self.observers:
            observer.released(passage)
        return passage.noisy_counts

    def replays(self, name: str) -> bool:
        """Whether that release was made before a crash, and will be compared with that."""
        return self._released_before(name) is not None

    def _released_before(self, name: str) -> str | None:
        """The digest of the same release before a crash: in test mode it is made once more."""
        if not self.randomness.repeatable or self.account is None:
            return None
        return self.account.digest(f"{name} of {self.run}")

    def _remember(
        self, name: str, before: str | None, values: Tensor, counts: tuple[float, ...] | None = None
    ) -> None:
        """Compare a release with the one before a crash, or note its digest for such a case."""
        if self.randomness.repeatable and self.account is not None:
            compare_or_note(self.account, f"{name} of {self.run}", before, values, counts)

    def _found_again(self) -> None:
        """A charge that seemed lost in a crash pays for the same release once more."""
        self.lost = max(0, self.lost - 1)

    def _noisy_counts(self, clipped: ClippedSum) -> tuple[float, ...] | None:
        if self.count_noise is None:
            return None
        assert clipped._counts is not None
        exact = clipped._counts.tolist()
        noise = self.randomness.normals(COUNTS, self.steps, len(exact))
        return tuple(float(c + self.count_noise * z) for c, z in zip(exact, noise, strict=True))

    def _add(
        self,
        total: Tensor,
        branch: Branch | None,
        gain: float,
        noises: Iterator[tuple[slice, Tensor, float]],
        values: Tensor,
    ) -> None:
        """Write gain * total + branch + noise into `values`."""
        for block, noise, std in noises:
            # The sum comes last or with the noise: no interrupt leaves a sum without noise.
            if gain == 1 and branch is None:
                torch.add(total[block], noise, alpha=std, out=values[block])
                continue
            if branch is None:
                torch.mul(noise, std, out=values[block])
            else:
                torch.add(branch.values[block], noise, alpha=std, out=values[block])
            values[block].add_(total[block], alpha=gain)

    def _noise(
        self, like: Tensor, stds: tuple[float, ...], purpose: bytes, number: int
    ) -> Iterator[tuple[slice, Tensor, float]]:
        """Noise by its number, a block at a time, and the standard deviation still to apply."""
        if not any(stds):
            yield slice(0, like.numel()), torch.zeros_like(like), 0.0
            return
        for block, noise in self.randomness.normal_blocks(like, number, purpose):
            if len(set(stds)) == 1:
                yield block, noise, stds[0]
                continue
            for segment, std in zip(self.segments, stds, strict=True):
                first, last = max(segment.start, block.start), min(segment.stop, block.stop)
                if first < last:
                    noise[first - block.start : last - block.start].mul_(std)
            yield block, noise, 1.0
