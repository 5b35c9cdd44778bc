"""The tape: what an observer at the door writes down of a run of the real engine.

An attacker has it without sums: every release, less the branch of a memory, which whoever knows the
method and all earlier releases can compute. The checks have it with sums, and with what the loop
could see afterwards. Such a recording reveals its records, so the checks make up theirs.

Played with `frozen`, the looks of an earlier recording, their releases take the place of the new
ones, and the noise that is drawn is another: who draws the noise of a release again, to take it
off, has it no more.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from vestige.engine.privacy_engine import PrivacyEngine
from vestige.privacy.events import Event
from vestige.release.observer import Observer, Passage
from vestige.release.query import Branch
from vestige.sampling.loader import Batch
from vestige.sampling.streams import COUNTS, FIRST_LOOK, MEASURE, NOISE

# Names and charges of a saved engine: the first are random, the second are compared by themselves.
_NOT_COMPARED = {"run", "own", "ledger", "others"}


@dataclass(frozen=True)
class Lot:
    """A lot as it was handed out: its number, its records and the batches that it came in."""

    number: int
    records: tuple[int, ...] = ()
    measures: bool = False
    batches: int = 0


@dataclass
class Look(Passage):
    """One time that something went through the door: a `Passage` to keep.

    `recalled` is the memory's branch when the lot was handed out, `recalled_at_release` the same
    branch later. `charges` are the (rate, multiplier) that the ledger was charged for the look,
    `late` of them only after the noise was drawn.
    """

    recalled: Tensor | None = None
    recalled_at_release: Tensor | None = None
    charges: tuple[tuple[float, float], ...] = ()
    late: int = 0

    @property
    def query(self) -> Tensor:
        """gain * sum + branch: the release without its noise."""
        query = self.gain * self.total
        return query if self.branch is None else query + self.branch

    @property
    def noise(self) -> Tensor:
        """The release without the query."""
        return self.values - self.query

    @property
    def without_branch(self) -> Tensor:
        """The release as an attacker reads it: gain * sum + noise."""
        return self.values if self.branch is None else self.values - self.branch


@dataclass
class Recording:
    """What a run showed. `told`, `weights`, `gradients` and `states` have an entry per lot."""

    segments: list[slice]
    group_names: tuple[str, ...]
    lots: list[Lot] = field(default_factory=list)
    looks: list[Look] = field(default_factory=list)
    told: list[dict[str, Any]] = field(default_factory=list)
    weights: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)
    states: list[dict[str, Any]] = field(default_factory=list)  # of the optimizer and the model
    state: dict[str, Any] = field(default_factory=dict)  # of the engine, at the end

    @property
    def sums(self) -> list[Look]:
        """The looks at a lot's sum."""
        return [look for look in self.looks if look.kind != "measurement"]

    @property
    def measurements(self) -> list[Look]:
        """The numbers of the whole data."""
        return [look for look in self.looks if look.kind == "measurement"]

    @property
    def by_lot(self) -> list[list[Look]]:
        """The looks at the sums of each lot, one or two."""
        return [list(looks) for _, looks in groupby(self.sums, lambda look: look.lot)]


class Tape(Observer):
    """Records what goes through the door of an attached engine while it is entered.

    Without `sums` the sums themselves are left out.
    """

    def __init__(
        self, engine: PrivacyEngine, *, sums: bool = True, frozen: Sequence[Look] | None = None
    ) -> None:
        self.seen = Recording(list(engine.door.segments), engine.plan.group_names)
        self._engine, self._door, self._sums = engine, engine.door, sums
        self._frozen = None if frozen is None else iter(frozen)
        self._batch: Batch | None = None
        self._branch: Branch | None = None  # of the lot at hand
        self._recalled: Tensor | None = None  # the values that it had
        self._look: Look | None = None  # the last one: charges that follow it are its own
        self._charges = engine.ledger.steps
        self._in_door = self._drawn = False
        self._noises = {NOISE, COUNTS, FIRST_LOOK, MEASURE}  # purposes of streams that are noise

    def __enter__(self) -> Tape:
        self._door.observers.append(self)
        if self._frozen is not None:
            self._door.randomness.relabel = self._other_noise
        return self

    def __exit__(self, *_: object) -> None:
        self._settle()
        self._door.observers.remove(self)
        self._door.randomness.relabel = None

    def handed_out(self, batch: Batch, branch: Branch | None) -> None:
        """Note the lot, and the branch before the loop sees it."""
        self._settle()
        if not self.seen.lots or self.seen.lots[-1].number != batch.lot:
            self.seen.lots.append(Lot(batch.lot, (), batch.measures))
        lot = self.seen.lots[-1]
        self.seen.lots[-1] = replace(lot, batches=lot.batches + 1)
        self._batch, self._branch = batch, branch
        self._recalled = None if branch is None else branch.values.clone()

    def arrives(self, passage: Passage) -> None:
        """Copy everything before the door can write to it."""
        self._settle()
        self._in_door = True
        kept = {
            name: value.clone() if isinstance(value, Tensor) else value
            for name, value in vars(passage).items()
            if self._sums or name != "total"
        }
        self._look = Look(**{"total": torch.zeros(0)} | kept)
        if passage.kind != "measurement" and self._branch is not None:
            self._look.recalled = self._recalled
            self._look.recalled_at_release = self._branch.values.clone()

    def drawing(self, passage: Passage) -> None:
        """A charge from here on is late."""
        self._drawn = True

    def charged(self, event: Event) -> None:
        """Note a charge that comes after its noise."""
        if self._drawn and self._look is not None:
            self._look.late += 1

    def released(self, passage: Passage) -> None:
        """Keep what is let out; in a replay let out what was let out before."""
        look, self._in_door = self._look, False
        assert look is not None
        look.values, look.stds = passage.values.clone(), tuple(passage.stds)
        look.noisy_counts = passage.noisy_counts
        self.seen.looks.append(look)
        earlier = None if self._frozen is None else next(self._frozen, None)
        if earlier is not None and earlier.values.shape == passage.values.shape:
            passage.values.copy_(earlier.values)
            passage.noisy_counts = earlier.noisy_counts

    def took(self, records: Iterable[int]) -> None:
        """The loop has the batch that was handed out last: these are its records."""
        assert self._batch is not None
        if not self._batch.empty:
            lot = self.seen.lots[-1]
            self.seen.lots[-1] = replace(lot, records=(*lot.records, *records))

    def stepped(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        """The optimizer has stepped: note everything that the end of a lot lets the loop see."""
        assert self._batch is not None
        if not self._batch.last:
            return
        seen, parameters = self.seen, list(model.parameters())
        seen.told.append(self._engine.diagnostics())
        seen.weights.append(torch.cat([p.detach().flatten() for p in parameters]))
        given = [p.grad.flatten() for p in parameters if p.grad is not None]
        seen.gradients.append(torch.cat(given).clone() if given else None)
        saved = {"optimizer": optimizer.state_dict(), "model": dict(model.state_dict())}
        seen.states.append(copy.deepcopy(saved))

    def finished(self) -> Recording:
        """The recording, with what the engine would save."""
        saved = self._engine.state_dict()
        self.seen.state = {name: saved[name] for name in saved.keys() - _NOT_COMPARED}
        return self.seen

    def _settle(self) -> None:
        """What was charged since the last look was charged for it."""
        if self._look is not None:
            charges = flat_charges(self._engine)
            self._look.charges, self._charges = charges[self._charges :], len(charges)
        self._look, self._drawn = None, False

    def _other_noise(self, purpose: bytes) -> bytes:
        """Other streams for noise. Lots, and what a method draws for itself, stay as they were."""
        if self._in_door:
            self._noises.add(purpose)
        noise = purpose.removeprefix(b"tails of ") in self._noises
        return b"replayed " + purpose if noise else purpose


def flat_charges(engine: PrivacyEngine) -> tuple[tuple[float, float], ...]:
    """The charges on the engine's ledger, one by one: (sampling rate, multiplier)."""
    events = engine.ledger.events
    return tuple((e.sample_rate, e.noise_multiplier) for e in events for _ in range(e.count))
