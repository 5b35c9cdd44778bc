"""Who has trained what in this process, so that a new engine knows what its epsilon leaves out.

An engine leaves a trace at the parameters, the optimizer and the data that it trains with. The
trace lives as long as one of them does and holds nothing of them: the run's name and its charges.
Things are known by their identity: the object itself, or the memory that its numbers are in, which
a copy by `.data`, a view or another `TensorDataset` over the same tensors shares. Weak references
tell a thing that is gone from a new one in its place.

Guarantee: an engine that is given a thing with a trace composes with that run's charges, or says
in its caveats how many they are. What was copied (deepcopy, load_state_dict, a file that is read
again) is another thing and not found: a ledger file is for that.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import Dataset

from vestige.errors import VestigeError
from vestige.gradients.shards import own_part
from vestige.privacy.ledger import Ledger

if TYPE_CHECKING:
    from vestige.engine.run import Run
    from vestige.gradients.capture import Capture

Alive = Callable[[], bool]
Marks = dict[Hashable, Alive]
_MOST_PARTS = 256  # of a list or a dictionary inside a data set that is looked through


@dataclass(frozen=True, eq=False)
class Trace:
    """One engine's: where its charges are, and the run while it is there."""

    session: str
    ledger: Ledger
    own: Ledger
    run: weakref.ref[Run]
    capture: weakref.ref[Capture]  # which the model's hooks keep, also where the run is gone

    def covered_by(self, ledger: Ledger) -> bool:
        """Whether all of its charges are on that ledger too."""
        return not self.own.steps or ledger.has_all(self.session, self.own.steps)

    @property
    def over(self) -> bool:
        """Whether the engine has let go of its model."""
        run = self.run()
        return run is None or run.detached

    def in_the_way(self, module: nn.Module, optimizer: Optimizer) -> bool:
        """Whether the engine is still attached to the model or the optimizer, or a part of it."""
        run, capture = self.run(), self.capture()
        if capture is None or (run.detached if run else not capture.handles):
            return False
        old = capture.module
        same = any(m is module for m in old.modules()) or any(m is old for m in module.modules())
        return same or (run is not None and run.optimizer is optimizer)

    def pay(self) -> None:
        """Have the engine's lot at hand charged now, and not when it is released or given up."""
        run = self.run()
        if run:
            with contextlib.suppress(VestigeError):  # its ledger may be gone
                run.pay_ahead()

    def step_aside(self) -> None:
        """Take its hooks off for a while; of an engine that is gone, those that it has left."""
        run, capture = self.run(), self.capture()
        if run:
            run.step_aside()
        elif capture:
            capture.detach()

    def come_back(self) -> None:
        """Put the hooks on again."""
        run, capture = self.run(), self.capture()
        if run and not run.detached:
            run.come_back()
        elif capture and not run:
            capture.detach()
            capture.attach()

    def end(self) -> None:
        """End the engine: another one has its place."""
        run = self.run()
        if run:
            with contextlib.suppress(VestigeError):  # its ledger may be gone
                run.abandon_lot()  # a lot that was drawn is charged
            with contextlib.suppress(VestigeError):
                run.detach()


@dataclass(frozen=True)
class Things:
    """What an engine was given, by marks that tell whether another one is the same."""

    weights: Marks  # of everything in the model, and of the optimizer
    trained: Marks  # of what the engine changes
    data: Marks

    @classmethod
    def of(cls, module: nn.Module, optimizer: Optimizer, data: Any) -> Things:
        """The marks of these."""
        tensors = list(itertools.chain(module.parameters(), module.buffers()))
        trained = [p for p in module.parameters() if p.requires_grad]
        held = _objects([optimizer])
        return cls(
            _objects(tensors) | _memory(tensors) | held,
            _objects(trained) | _memory(trained) | held,
            _data_marks(data),
        )

    def leave(self, trace: Trace) -> None:
        """Let later engines on the same things find the trace."""
        for marks, traces in ((self.trained, _AT_WEIGHTS), (self.data, _AT_DATA)):
            for mark, alive in marks.items():
                traces.setdefault(mark, []).append((alive, trace))
            if len(traces) > 2 * _SIZES.get(id(traces), 1024):
                for mark in list(traces):
                    if not _alive(traces, mark):
                        del traces[mark]
                _SIZES[id(traces)] = max(1024, len(traces))

    def in_the_way(self, module: nn.Module, optimizer: Optimizer) -> list[Trace]:
        """Engines whose place another one on the model and the optimizer would take."""
        return [trace for trace in self.trained_by() if trace.in_the_way(module, optimizer)]

    def ledger_before(self, leaving: Sequence[Trace]) -> Ledger | None:
        """The ledger of the engines that have trained the model or the optimizer, if any have.

        Where their charges are on several ledgers, or on a file that is closed once those that are
        `leaving` have left, they are put together on a new one.
        """
        before = [trace for trace in self.trained_by() if trace.own.steps or not trace.over]
        if not before:
            return None
        last = before[-1].ledger
        missing = [trace for trace in before if not trace.covered_by(last)]
        ends = last.engines <= sum(trace.ledger is last for trace in leaving)
        if not missing and not (last.file and (ends or last.file.closed)):
            return last
        found = last.copy()
        for trace in missing:
            if not trace.covered_by(found):
                found.take(trace.ledger)
        return found

    def left_out_of(self, ledger: Ledger) -> list[str]:
        """What engines on the same things have released that is not on `ledger`, in sentences."""
        trained = [trace for trace in self.trained_by() if not trace.covered_by(ledger)]
        on_data = [trace for trace in self.seen_by() if not trace.covered_by(ledger)]
        found = []
        for traces, what in (
            (trained, "have trained this model, a part of it or its optimizer"),
            ([t for t in on_data if t not in trained], "have trained on this data or a part of it"),
        ):
            if traces:
                releases = sum(trace.own.steps for trace in traces)
                found.append(
                    f"other engines of this process ({len(traces)}) {what}: their {releases} "
                    "releases are not part of epsilon (hand their ledger on, "
                    "PrivacyEngine(ledger=engine.ledger))"
                )
        return found

    def trained_by(self) -> list[Trace]:
        """Engines that have trained the model or the optimizer, the first one first."""
        return _found(_AT_WEIGHTS, self.weights)

    def seen_by(self) -> list[Trace]:
        """Engines that have trained on the data, the first one first."""
        return _found(_AT_DATA, self.data)


Traces = dict[Hashable, list[tuple[Alive, Trace]]]
_AT_WEIGHTS: Traces = {}
_AT_DATA: Traces = {}
_SIZES: dict[int, int] = {}  # how many marks were left when traces were last swept


def _found(traces: Traces, marks: Mapping[Hashable, Alive]) -> list[Trace]:
    found: dict[Trace, None] = {}
    for mark in marks:
        if mark in traces:
            found.update((trace, None) for _, trace in _alive(traces, mark))
    return list(found)


def _alive(traces: Traces, mark: Hashable) -> list[tuple[Alive, Trace]]:
    """The traces at a mark; what is gone had the same address and is nothing else."""
    traces[mark] = [(alive, trace) for alive, trace in traces[mark] if alive()]
    return traces[mark]


def _objects(things: Iterable[Any]) -> Marks:
    marks: Marks = {}
    for thing in things:
        with contextlib.suppress(TypeError):  # of a type without weak references
            marks["object", id(thing)] = partial(_is_there, weakref.ref(thing))
    return marks


def _memory(tensors: Iterable[Tensor | np.ndarray[Any, Any]]) -> Marks:
    """Marks of the memory that these numbers are in."""
    marks: Marks = {}
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            while isinstance(tensor.base, np.ndarray):
                tensor = tensor.base
            marks["cpu", tensor.ctypes.data] = partial(_is_there, weakref.ref(tensor))
            continue
        # A tensor without memory: a ValueError where it is a lazy layer's.
        with contextlib.suppress(RuntimeError, NotImplementedError, ValueError):
            storage = own_part(tensor).untyped_storage()
            if storage.data_ptr():
                mark = str(tensor.device), storage.data_ptr()
                marks[mark] = partial(_is_there, weakref.ref(storage))
    return marks


def _is_there(thing: weakref.ref[Any]) -> bool:
    return thing() is not None


def _data_marks(data: Any) -> Marks:
    parts = list(_parts(data))
    sets = [part for part in parts if isinstance(part, Dataset)]
    arrays = [part for part in parts if not isinstance(part, Dataset)]
    return _objects([data, *sets]) | _memory(arrays)


def _parts(data: Any, depth: int = 4) -> Iterator[Any]:
    """The data sets inside a data set, and tensors and arrays that are long enough for records."""
    with contextlib.suppress(TypeError):
        records = len(data)
        inside = [data] if isinstance(data, list | tuple) else vars(data).values()
        for value in inside:
            yield from _inside(value, records, depth)


def _inside(value: Any, records: int, depth: int) -> Iterator[Any]:
    if isinstance(value, Tensor | np.ndarray):
        size = value.numel() if isinstance(value, Tensor) else value.size
        if size >= records > 0:  # not the mean that pixels are scaled by, or the like
            yield value
    elif depth and isinstance(value, Dataset):
        yield value
        yield from _parts(value, depth - 1)
    elif depth and isinstance(value, list | tuple) and len(value) == records > 0:
        for record in (value[0], value[-1]):  # one would do, unless somebody has changed it
            yield from _inside(record, 1, depth - 1)
    elif depth and isinstance(value, list | tuple | dict) and len(value) <= _MOST_PARTS:
        for item in value.values() if isinstance(value, dict) else value:
            yield from _inside(item, records, depth - 1)
