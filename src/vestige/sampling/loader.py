"""The private loader: lots over the user's dataset, in physical batches that the engine knows of.

The batches are the same whatever the number of worker processes.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    TensorDataset,
    default_collate,
)

from vestige.checks import Shown
from vestige.errors import ConfigError, PrivacyError, VestigeError
from vestige.plan import Table
from vestige.sampling.collate import Collate, Views, records_in, tensors_of
from vestige.sampling.forward_randomness import LotStream, WorkerSeeds, explicit_generators
from vestige.sampling.lots import Drawing, Poisson
from vestige.sampling.streams import WORKERS, Randomness
from vestige.sampling.units import Units


@dataclass
class Batch:
    """One physical batch handed out by the private loader, and what has become of it."""

    rows: int
    empty: bool = False  # the one row is a stand-in and contributes nothing
    last: bool = True  # the lot's last physical batch
    lot: int = 0
    measures: bool = False  # part of a pass over all records that releases one number
    unit_rows: int = 1  # rows of each privacy unit, one unit after the other
    weights: Tensor | None = None  # of the rows in their units' losses, times `unit_rows`
    stream: LotStream | None = None  # what the lot's forward passes draw; None for synthetic rows
    record: Any = None  # what the capture has noted of its forward pass
    backward: int | None = None  # the autograd pass that brings its gradients
    done: bool = False
    given: tuple[weakref.ref[Tensor], ...] = ()  # what the loop gets of it
    single: dict[int, int] = field(default_factory=dict)  # the row of tensors that are one record's

    def alive(self) -> Iterator[Tensor]:
        """The tensors of the batch that the loop still has."""
        yield from (t for t in (ref() for ref in self.given) if t is not None)

    def scale(self, mean: bool) -> float:
        """What turns the gradients of the loop's loss, a mean or a sum over all rows, into those
        of the units' own losses."""
        return (self.rows if mean else 1) / self.unit_rows


class LotSampler(Sampler[list[int]]):
    """Yields the physical batches of an epoch's lots and remembers, in order, what each one is.

    `drawing` draws the lots: Poisson's by default, others of lots.py otherwise. `pieces` is the
    number of batches that every lot comes in. What is drawn are privacy units: records, or users
    where `units` says which records they have. A unit is never split.

    Guarantee: how many batches there are, and which of them ends a lot, follows from public numbers
    alone, whatever is drawn: spare batches have no rows, and a lot with too many rows has more of
    them in each batch.
    """

    def __init__(
        self,
        randomness: Randomness,
        size: int,
        sample_rate: Table,
        lots_per_epoch: int,
        max_physical_batch_size: int | None = None,
        drawing: Drawing | None = None,
        pieces: int | None = None,
    ) -> None:
        self._randomness = randomness
        self._drawing = Poisson(randomness, size, sample_rate) if drawing is None else drawing
        self.size, self.sample_rate, self.lots = size, sample_rate, lots_per_epoch
        # With (rows, batches), all records are handed out before every epoch, in so many batches.
        self.measured_in: tuple[int, int] | None = None
        self.physical = max_physical_batch_size  # units
        self.units: Units | None = None
        self.views: Views | None = None
        rates = sample_rate if isinstance(sample_rate, tuple) else (sample_rate,)
        self.pieces = pieces or batches_of_a_lot(max(rates) * size, max_physical_batch_size)
        self.next_lot = 0  # the first lot that was never handed out
        self.first_lot = 0  # the first lot of the epoch under way
        self.given_up = -1  # the last lot that was abandoned
        self.generators: tuple[Any, ...] = ()  # that the model and the data set hold themselves
        self.batches: deque[Batch] = deque()  # in the order of the index lists

    def __len__(self) -> int:
        return self.lots * self.pieces + (self.measured_in[1] if self.measured_in else 0)

    @property
    def _turns(self) -> int:
        """The lots of an epoch, and the pass over all records where there is one."""
        return self.lots + (self.measured_in is not None)

    def __iter__(self) -> Iterator[list[int]]:
        # Workers read ahead, so the count of lots handed out is kept by `take`, not here. A loop
        # that was left goes on with its own queue, which nobody reads any more.
        batches = self.batches = deque()
        self.first_lot = self.next_lot
        for number in range(self.next_lot, self.next_lot + self._turns):
            measures = self.measures(number)
            rank, world = self._randomness.share
            every = range(self.size) if measures else self._drawing.lot(number).tolist()
            lot = list(every) if self._randomness.sharded else list(every[rank::world])
            views = self.views.count if self.views else 1
            fewest, pieces = self.physical or 1, self.pieces
            if measures and self.measured_in:
                fewest, pieces = self.measured_in
            step = max(fewest, -(-len(lot) // pieces))
            for piece in range(pieces):
                drawn = lot[piece * step : (piece + 1) * step]
                rows, weights = drawn, None
                if self.units:
                    rows, weights = self.units.rows(self._randomness, number, drawn)
                if weights is not None:
                    weights = weights.repeat_interleave(views)
                last, count = piece == pieces - 1, max(1, len(drawn)) * self.unit_rows
                batches.append(
                    Batch(count, not drawn, last, number, measures, self.unit_rows, weights)
                )
                yield rows

    @property
    def unit_rows(self) -> int:
        """The rows of a batch that each unit has: its records times their views."""
        records = self.units.rows_per_unit if self.units else 1
        return records * (self.views.count if self.views else 1)

    def measures(self, number: int) -> bool:
        """Whether lot `number` is all records, handed out to be measured."""
        return self.measured_in is not None and number % self._turns == 0

    def seed(self) -> bytes:
        """A key for the workers of the coming loop, from the secret key and the next lot."""
        rank, _ = self._randomness.share
        purpose = WORKERS + (rank.to_bytes(4, "big") if rank else b"")
        return self._randomness.stream(purpose, self.next_lot).update(bytes(32))

    def stream(self, lot: int) -> LotStream:
        """What is drawn while lot `lot` is read and while the model runs on it."""
        return LotStream(self._randomness, lot, self._randomness.share[0], self.generators)

    def take(self) -> Batch:
        """What the next batch in order is; its lot counts as handed out from now on."""
        batch = self.batches.popleft()
        self.next_lot = batch.lot + 1
        return batch


def batches_of_a_lot(expected: float, physical: int | None, world: int = 1) -> int:
    """The batches of at most `physical` rows that every lot of that expected size comes in, on
    each of `world` ranks.

    There is room for six standard deviations more. A Poisson lot exceeds that once in 10^5 where
    one record is expected and once in 3 * 10^8 where 1,000 are; it then comes in larger batches.
    """
    if physical is None:
        return 1
    return math.ceil((expected + 6 * math.sqrt(expected)) / (world * physical))


_END = object()  # of an epoch


class PrivateLoader(Shown, DataLoader[Any]):
    """A `DataLoader` of Poisson lots over the user's dataset.

    Its length is the number of batches in an epoch. Every lot comes in one, or, with
    `max_physical_batch_size`, in as many as `batches_of_a_lot` says. A batch without records is one
    row of zeros, which the engine leaves out of the sum.

    Guarantee: the number of batches is public, and the same for every lot. What the data set and
    the collate function draw (augmentation) comes from the secret key, in this process and in
    workers, whatever `generator` and `worker_init_fn` the source has.
    """

    # Accelerate leaves such a loader as it is. It would read the lots by a loader of its own, of
    # which the engine knows nothing.
    _is_accelerate_prepared = True

    def __init__(
        self,
        source: DataLoader[Any],
        lots: LotSampler,
        hand_out: Callable[[Batch], None],
        model: nn.Module | None = None,
    ) -> None:
        self._lots, self._hand_out, self._model = lots, hand_out, model
        self._iteration = 0
        self._tensors = _in_memory(source, lots.views)
        workers = source.num_workers
        # Starting a loop draws a seed for the workers. It comes from the secret key: neither from
        # torch's generator nor from the one that the source was given, whose seed may be known.
        self._seeds = torch.Generator()
        collate = Collate(source.dataset, source.collate_fn, lots.views, lots.unit_rows)
        self._worker_seeds = WorkerSeeds(source.worker_init_fn, collate)
        super().__init__(
            source.dataset,
            batch_sampler=lots,
            num_workers=workers,
            collate_fn=collate,
            pin_memory=source.pin_memory,
            timeout=source.timeout,
            worker_init_fn=self._worker_seeds if workers else None,
            multiprocessing_context=source.multiprocessing_context if workers else None,
            generator=self._seeds,
            prefetch_factor=source.prefetch_factor if workers else None,
            persistent_workers=source.persistent_workers,
        )

    @property
    def batches_per_lot(self) -> int:
        """How many batches every lot comes in."""
        return self._lots.pieces

    def _shown(self, whole: bool) -> dict[str, object]:
        # Not the records: their true number is private where another one was declared.
        most = self._lots.physical
        return {
            "lots of an epoch": self._lots.lots,
            "batches": f"{len(self)} ({self.batches_per_lot} of each lot)",
            "rows of a batch": "all of a lot"
            if most is None
            else f"{most * self._lots.unit_rows}, rarely more",
            "workers": self.num_workers,
            "order": "lots are drawn anew by the secret key in every epoch",
        }

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._iteration += 1
        mine = self._iteration
        secret = self._worker_seeds.secret = self._lots.seed()
        self._seeds.manual_seed(int.from_bytes(secret[:8], "big"))
        self._lots.generators = explicit_generators(self.dataset, self.collate_fn, self._model)
        reads_here = not self.num_workers and (self._tensors is None or self._lots.views)
        stream, lot_ends = self._lots.stream(self._lots.next_lot), False
        batches = super().__iter__() if self._tensors is None else self._indexed(self._tensors)
        while True:
            if lot_ends:
                stream, lot_ends = self._lots.stream(self._lots.next_lot), False
            try:
                with stream.installed() if reads_here else nullcontext():
                    batch = next(batches, _END)
            except VestigeError:
                raise
            except Exception as error:  # whatever a dataset, a collate function or a worker raises
                raise self._unread(error, stream) from error
            if mine != self._iteration:
                raise PrivacyError(
                    "the private loader was iterated again while an earlier loop over it goes on: "
                    "lots would be drawn twice. Finish or leave one loop before the next."
                )
            if batch is _END:
                if self._lots.batches:  # a dataset said StopIteration, which would end the epoch
                    raise self._unread(StopIteration(), stream)
                return
            taken = self._lots.take()
            taken.stream, lot_ends = stream, taken.last
            if taken.lot == self._lots.given_up:
                continue  # the rest of a lot that was abandoned
            taken.given = tuple(map(weakref.ref, tensors_of(batch)))
            taken.single = records_in(batch, taken.rows)
            self._hand_out(taken)
            yield batch

    def _unread(self, error: Exception, stream: LotStream) -> ConfigError:
        """The error for a batch that could not be read. Its lot was drawn, so it is handed out all
        the same: it has to be abandoned, which charges it, before the next one is drawn."""
        self._iterator = None  # workers that died are started again
        if self._lots.batches:
            taken = self._lots.take()
            taken.stream = stream
            if taken.lot != self._lots.given_up:
                self._hand_out(taken)
        lines = str(error).strip().splitlines() or ["(no message)"]
        # A worker sends its whole traceback, which ends with what it raised.
        said = lines[-1] if lines[0].startswith("Caught") else lines[0]
        return ConfigError(
            f"a batch could not be read: {type(error).__name__}: {said[:200]} (raised by the "
            "dataset, its collate function or a worker). Its lot counts as drawn: mend the data, "
            "call engine.abandon_lot(), and go on with a new loop over the loader."
        )

    def _indexed(self, tensors: tuple[Tensor, ...]) -> Iterator[list[Tensor]]:
        """Tensors in memory are indexed at once: collating row by row costs more than a step."""
        for rows in self._lots:
            if rows:
                index = torch.tensor(rows, device=tensors[0].device)
                yield self._viewed([t.index_select(0, index) for t in tensors])
            else:
                yield [t.new_zeros(self._lots.unit_rows, *t.shape[1:]) for t in tensors]

    def _viewed(self, rows: list[Tensor]) -> list[Tensor]:
        """The views of many records at once, and whatever is beside them once for each view."""
        views = self._lots.views
        if views is None or views.of_many is None:
            return rows
        beside = [t.repeat_interleave(views.count, 0) for t in rows[1:]]
        return [views.of_many.views(rows[0], views.count), *beside]


def _in_memory(source: DataLoader[Any], views: Views | None) -> tuple[Tensor, ...] | None:
    plain = source.num_workers == 0 and not source.pin_memory
    plain = plain and (views is None or views.of_many is not None)
    if plain and type(source.dataset) is TensorDataset and source.collate_fn is default_collate:
        return source.dataset.tensors
    return None


def unwrapped(loader: Any) -> Any:
    """The DataLoader that Accelerate or Fabric was given; any other loader as it is."""
    library = type(loader).__module__.partition(".")[0]
    if library == "lightning" and isinstance(getattr(loader, "_dataloader", None), DataLoader):
        return loader._dataloader
    source = getattr(loader, "base_dataloader", None) if library == "accelerate" else None
    if not isinstance(source, DataLoader) or type(source.batch_sampler) is not BatchSampler:
        return loader
    workers = source.num_workers
    return DataLoader(
        source.dataset,
        batch_size=source.batch_sampler.batch_size,
        sampler=source.batch_sampler.sampler,
        num_workers=workers,
        collate_fn=source.collate_fn,
        pin_memory=source.pin_memory,
        timeout=source.timeout,
        worker_init_fn=source.worker_init_fn,
        multiprocessing_context=source.multiprocessing_context if workers else None,
        prefetch_factor=source.prefetch_factor if workers else None,
        persistent_workers=source.persistent_workers,
    )


def check_loader(loader: Any) -> int:
    """The batch size of a loader that Poisson lots can stand in for; ConfigError for any other."""
    if not isinstance(loader, DataLoader):
        raise ConfigError(
            f"data_loader is a {type(loader).__name__}: pass a torch.utils.data.DataLoader."
        )
    if isinstance(loader, PrivateLoader):
        raise ConfigError("data_loader is already private: pass the original DataLoader.")
    if isinstance(loader.dataset, IterableDataset):
        raise ConfigError(
            "data_loader reads an IterableDataset, from which no Poisson lot can be drawn: give a "
            "dataset with __len__ and __getitem__."
        )
    try:
        records = len(loader.dataset)  # type: ignore[arg-type]
    except (TypeError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"data_loader's dataset has no length ({error}): Poisson lots need a dataset with "
            "__len__ and __getitem__."
        ) from error
    sampler = loader.sampler
    dealers = type(sampler).__name__, type(loader.batch_sampler).__name__
    if "DistributedSampler" in dealers or "BatchSamplerShard" in dealers:
        raise ConfigError(
            "data_loader deals its records out to several processes, which make_private does by "
            "itself: give it the loader from before Accelerate's prepare or Fabric's "
            "setup_dataloaders. Its batch_size is that of the whole lot."
        )
    plain_random = (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == records
    )
    if loader.batch_size is None:
        raise ConfigError(
            "data_loader has a batch_sampler of its own or no batch_size: Poisson lots would "
            "silently replace it. Give batch_size=... instead; it becomes the expected lot size."
        )
    whole = getattr(sampler, "data_source", None) is loader.dataset
    if not whole or not (type(sampler) is SequentialSampler or plain_random):
        raise ConfigError(
            f"data_loader has a {type(sampler).__name__}: the privacy analysis holds for Poisson "
            "lots only, which would silently replace it. Use shuffle=True or no sampler, and put "
            "subsets into the dataset (torch.utils.data.Subset)."
        )
    if records == 0:
        raise ConfigError("data_loader has an empty dataset: there is nothing to train on.")
    return loader.batch_size
