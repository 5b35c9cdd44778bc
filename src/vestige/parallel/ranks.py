"""Data parallel by key: every rank makes the same release.

Rank 0 makes the 256-bit key and sends it over a CPU (gloo) group. Lots and noise are functions of
(key, step), so that every rank draws the same global lot, takes rows rank::world of it and clips
them: a record is on one rank, and its norm needs no message. One all_reduce of the flat sums gives
every rank the clipped sum of the whole lot. Every rank adds the same noise, so that releases,
memory, optimizers and weights agree without another message.

The same all_reduce carries, for each rank, a fingerprint of its weights, of its last release and of
where it stands. They are compared before the sum is released: ranks that have come apart stop.

Guarantee: that of one process, for every world size: the noise has variance (sigma C)^2 once. Rank
0 has written the charge before it enters the all_reduce, so that no rank can have a sum that was
not charged. Links between ranks are trusted: sums travel on them without noise, and so does the
key.
"""

from __future__ import annotations

import itertools
import math
import os
import secrets
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from vestige.errors import ConfigError, PrivacyError, VestigeError
from vestige.gradients.shards import is_sharded
from vestige.parallel.faults import gone, is_of_messages
from vestige.parallel.fingerprints import DIGITS, fingerprints
from vestige.parallel.records import order_of

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch.distributed import ProcessGroup

    from vestige.gradients.collector import Collector

_T = TypeVar("_T")
_SEEN = ("weights", "last release", "place in the run", "noise or bounds")
_UNSAID = ("records",)  # private: only that they differ is told
_LAUNCHERS = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")  # torchrun, Open MPI, MPICH
_SLURM = ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")


class Ranks:
    """The processes of one run; without a group, this one alone."""

    def __init__(self, group: ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group else 0
        if self.rank < 0:
            raise ConfigError(
                "this process is not one of process_group: call make_private on its ranks alone."
            )
        self.world = dist.get_world_size(group) if group else 1
        self.thorough = False  # whether a group of one adds up and compares as several do
        self._first = dist.get_global_rank(group, 0) if group else 0
        self.cpu = _on_cpu(group) if group else None
        self.fault: Callable[[], None] = lambda: None  # charges a lot at hand when a message fails
        self._message: Tensor | None = None
        self._places: list[tuple[str, int]] = []  # machine and process of every rank
        self._places = self._each_has((socket.gethostname(), os.getpid()))

    @classmethod
    def found(cls, group: ProcessGroup | None = None) -> Ranks:
        """The ranks of `group`, or of the process group that is there.

        Refuses one of several processes that have none: each would train on all records.
        """
        if group is None and dist.is_available() and dist.is_initialized():
            group = dist.group.WORLD
        count, told = launched()
        if group is None and count > 1:
            raise ConfigError(
                f"this is one of {count} processes ({told}) without a process group: each of "
                "them would draw lots of its own from all records and report an epsilon for itself "
                "alone. Call torch.distributed.init_process_group('gloo' or 'nccl') before "
                "make_private, or set WORLD_SIZE=1 if there is only one."
            )
        return cls(group)

    @property
    def leads(self) -> bool:
        """Whether this process writes: ledger, checkpoints, progress."""
        return self.rank == 0

    @property
    def alone(self) -> bool:
        """Whether there is nobody to add up or to compare with: in a group of one neither."""
        return self.group is None or (self.world == 1 and not self.thorough)

    def check_alone(self) -> None:
        """Refuse a run without a group while there is one of several processes."""
        grouped = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        if self.group is None and grouped:
            raise PrivacyError(
                "a process group was made after make_private, which therefore trains this process "
                "alone, on all records and at an epsilon of its own: call init_process_group "
                "before make_private."
            )

    # -- before the first lot ---------------------------------------------------------------

    def key(self, own: bytes | None) -> bytes | None:
        """The key of the run: rank 0's own, or a fresh one. None alone: whoever asks makes one."""
        if self.group is None:
            return own
        return self.sent(own or secrets.token_bytes(32))

    def sent(self, value: _T) -> _T:
        """Rank 0's `value`, on every rank. It goes over the CPU group, never through a store."""
        if self.group is None:
            return value
        box = [value]
        with self.together("agree"):
            dist.broadcast_object_list(box, src=self._first, group=self.cpu)
        return box[0]

    def decided(self, decide: Callable[[], _T]) -> _T:
        """What rank 0 decides, on every rank; what it refuses is refused everywhere."""
        if self.alone:
            return decide()
        answer: tuple[Any, VestigeError | None] = (None, None)
        mine: BaseException | None = None
        if self.leads:
            try:
                answer = decide(), None
            except VestigeError as error:
                answer = None, error
            except BaseException as error:  # the others must not wait for an answer
                mine, said = error, f"{type(error).__name__}: {error}"
                answer = None, PrivacyError(f"rank 0 has failed with {said[:200]}")
        decided, refused = self.sent(answer)
        if mine is not None:
            raise mine
        if refused is not None:
            raise refused
        value: _T = decided
        return value

    def all_well(self, problem: Exception | None = None) -> None:
        """Raise on every rank what one of them brings."""
        if self.alone:
            if problem:
                raise problem
            return
        said = None if problem is None else str(problem)
        for rank, other in enumerate(self._each_has(said)):
            if other is not None:
                raise problem or PrivacyError(f"rank {rank} was refused: {other}")

    def each(self, act: Callable[[], _T]) -> _T:
        """What `act`, which sends no messages, makes here; what stops one rank is told to all."""
        try:
            made = act()
        except Exception as error:
            self.all_well(error)
            raise
        self.all_well()
        return made

    def least(self, number: float) -> Any:
        """The least of every rank's numbers."""
        return min(self._each_has(number))

    @property
    def beside(self) -> int:
        """How many ranks this machine has."""
        return sum(host == socket.gethostname() for host, _ in self._places)

    def check_same(self, facts: dict[str, Any]) -> None:
        """Refuse ranks whose settings differ, naming what."""
        if self.group is None:
            return
        for rank, other in enumerate(self._each_has(facts)):
            names = sorted(k for k in facts.keys() | other.keys() if facts.get(k) != other.get(k))
            if names:
                shown = "; ".join(
                    k if k in _UNSAID else f"{k}: {facts.get(k)} and {other.get(k)}"
                    for k in names[:3]
                )
                raise ConfigError(
                    f"ranks {self.rank} and {rank} were given different settings ({shown}): every "
                    "rank must call make_private with the same ones."
                )

    def check_records(self, dataset: Any, sharded: bool) -> bool:
        """Refuse ranks whose records do not fit; False where a data set does not show all its own.

        Record i must be the same on every rank, since each takes other places of the same lot, or,
        `sharded`, on one rank alone. Only whether they agree is told.
        """
        if self.group is None:
            return True
        every = self._each_has(order_of(dataset))
        shown = [digest for digest, whole in every if whole]
        if sharded and len(set(shown)) < len(shown):
            raise ConfigError(
                "sharded=True, and two ranks have the same records: each would count twice. Give "
                "every rank records of its own, or leave sharded out."
            )
        if not sharded and len(set(every)) > 1:
            raise ConfigError(
                "the ranks have different records, or the same in another order, so that a record "
                "could be on two of them: load the same data in the same order on every rank (sort "
                "what a folder lists)."
            )
        return len(shown) == len(every)

    def check_units(self, digests: Callable[[], list[str]], sharded: bool) -> None:
        """Refuse ranks on two of which a user's rows are, by digests of owners and of ids."""
        if self.group is None:
            return
        every = self._each_has(digests())
        if not sharded and any(other != every[0] for other in every):
            raise ConfigError(
                "the ranks were given different units, so that a user could be on two of them: "
                "give units=... with the same ids in the same order on every rank."
            )
        ids = [one for _, *own in every for one in own]
        if sharded and len(set(ids)) < len(ids):
            why = "a user of units=... has records on two ranks: each would clip a part of them"
            raise ConfigError(f"sharded=True, and {why}. Keep a user's records on one rank.")

    def give_weights(self, tensors: Iterable[Tensor]) -> None:
        """Every rank begins with rank 0's weights and buffers; shards are its own."""
        if self.group is None:
            return
        with self.together("share the weights"), torch.no_grad():
            for tensor in tensors:
                if tensor.numel() and not is_sharded(tensor):
                    once = [slice(None) if stride else slice(1) for stride in tensor.stride()]
                    own = tensor.detach()[tuple(once)]  # of what is expanded, one
                    whole = torch.empty_like(own, memory_format=torch.contiguous_format).copy_(own)
                    dist.broadcast(_as_bytes(whole), self._first, group=self.group)
                    own.copy_(whole)

    # -- at every release -------------------------------------------------------------------

    def carry(self, collector: Collector) -> None:
        """Keep the collector's sum at the head of the message that ranks add up."""
        if self.group is None:
            return
        total = collector.total
        beside = collector.groups.count + DIGITS * len(_SEEN) * self.world
        if collector.sharded:  # whose sums are complete: only what stands beside them travels
            self._message = total.new_zeros(beside)
            return
        self._message = total.new_zeros(total.numel() + beside)
        collector.keep_in(self._message[: total.numel()])

    def add_up(self, collector: Collector, seen: Sequence[Iterable[Tensor] | int]) -> None:
        """Make the collector's sum, counts and norms those of the whole lot, on every rank.

        `seen` is what every rank must have alike: tensors, or a number.
        """
        if self.alone:
            return
        message, groups = self._message, collector.groups.count
        assert message is not None
        fixed = groups + DIGITS * len(_SEEN) * self.world
        counts, slots = message[-fixed:].split([groups, fixed - groups])
        counts.zero_()
        if collector.counts is not None:
            counts.copy_(collector.counts)  # halves, far below 2^23: exact also in float32
        slots.zero_()
        every = slots.view(self.world, -1)
        every[self.rank] = fingerprints(seen, slots)
        with self.together("add up their clipped sums"):
            dist.all_reduce(message, group=self.group)
            if collector.norms is not None:
                collector.norms[:] = self._interleaved(collector.norms)
        if collector.counts is not None:
            collector.counts.copy_(counts)
        self._compare(every.tolist())

    def add_number(self, exact: Tensor, seen: Sequence[Any]) -> None:
        """Add up a number of all ranks, in place; `seen` is what every rank must have alike."""
        if self.alone:
            return
        every = self._each_has((float(exact), tuple(seen)))
        for rank, (_, other) in enumerate(every):
            if other != every[0][1]:
                raise self._apart(rank, ("place in the run or noise",))
        exact.fill_(math.fsum(number for number, _ in every))

    def _interleaved(self, own: Sequence[float]) -> list[float]:
        """The norms of the whole lot in its order: that of rank r's j-th row is r + j world."""
        turns = itertools.zip_longest(*self._each_has(list(own)))
        return [norm for turn in turns for norm in turn if norm is not None]

    def _each_has(self, value: _T) -> list[_T]:
        """Every rank's own `value`, by rank."""
        if self.group is None:
            return [value]
        every: list[Any] = [None] * self.world
        with self.together("compare what they have"):
            dist.all_gather_object(every, value, group=self.cpu)
        return every

    def each_at(self, place: tuple[int, ...]) -> list[tuple[int, ...]]:
        """Every rank's few whole numbers, by rank."""
        own = torch.tensor(place, dtype=torch.int64)
        every = [torch.empty_like(own) for _ in range(self.world)]
        with self.together("meet"):
            dist.all_gather(every, own, group=self.cpu)
        return [tuple(one.tolist()) for one in every]

    def _compare(self, every: list[list[float]]) -> None:
        """Stop where a rank has seen something else than rank 0."""
        for rank, digits in enumerate(every):
            parts = zip(_SEEN, range(0, len(digits), DIGITS), strict=True)
            other = [n for n, i in parts if digits[i : i + DIGITS] != every[0][i : i + DIGITS]]
            if other:
                raise self._apart(rank, other)

    def _apart(self, rank: int, what: Sequence[str]) -> PrivacyError:
        return PrivacyError(
            f"rank {rank} has come apart from rank 0: its {' and '.join(what)} differ. Nothing was "
            "released from this lot, which is charged. Every rank must run the same code on the "
            "same kind of device, and change weights by optimizer.step() alone; go on from the "
            "last checkpoint."
        )

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """A message of all ranks. Where one is gone, the others end with an error that names it."""
        try:
            yield
        except (VestigeError, torch.OutOfMemoryError):
            raise
        except RuntimeError as error:
            raise self._broken(what) from error

    @contextmanager
    def passing(self) -> Iterator[None]:
        """A pass of a sharded model, whose messages are FSDP's: told alike where one fails."""
        try:
            yield
        except RuntimeError as error:
            if not is_of_messages(error):
                raise
            raise self._broken("run a pass of the sharded model") from error

    def _broken(self, what: str) -> PrivacyError:
        self.fault()
        return PrivacyError(
            f"the ranks could not {what}: {gone(self._places)} What was added up of a lot is "
            "charged on rank 0's ledger. Start the processes again and go on from the last "
            "checkpoint."
        )


def launched() -> tuple[int, str]:
    """How many processes a launcher has started together, and the variable that says so.

    SLURM's number is also that of an allocation in which nothing was started yet: it counts only
    for a process that has a number itself.
    """
    names = [*_LAUNCHERS, *(_SLURM if "SLURM_PROCID" in os.environ else ())]
    told = next((name for name in names if os.environ.get(name)), _LAUNCHERS[0])
    return int(os.environ.get(told) or 1), told


def _on_cpu(group: ProcessGroup) -> ProcessGroup:
    """A gloo group of the same ranks: secrets and decisions go over it."""
    if dist.get_backend(group) == "gloo":
        return group
    ranks = dist.get_process_group_ranks(group)
    made: ProcessGroup = dist.new_group(ranks, backend="gloo", use_local_synchronization=True)
    return made


def _as_bytes(whole: Tensor) -> Tensor:
    """The same memory as bytes."""
    return whole.view(-1).view(torch.uint8)
