"""Watches a model's forward pass and turns its backward pass into clipped sums.

A torch function mode is active while the root module runs. It sees every operation by name, so
attention blocks, tied weights, functional code and layers called twice need no module rule. An
operation that a rule covers runs with the parameter detached, so autograd gives that parameter no
gradient; the rule turns the operation's input and output gradient into a `Use` instead. Any other
way for a gradient to reach a parameter is refused: by name in the forward pass, and by a hook on
the parameter itself for what the mode did not see.

The model stays the user's own object: its hooks are not copied by `deepcopy` or `torch.save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from vestige.errors import ConfigError, PrivacyError, VestigeError
from vestige.geometry import Geometry
from vestige.gradients import backward_code
from vestige.gradients.backward import BackwardPass, Forward
from vestige.gradients.caches import Caches
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import ForwardRecord
from vestige.gradients.groups import Groups
from vestige.gradients.hooks import (
    FACTS,
    LENGTHS,
    FollowedHook,
    Guard,
    Hook,
    Interruptible,
    Refusal,
    changed_by_forward,
    refuse_around_the_model,
    refuse_training,
    versions,
)
from vestige.gradients.modes import Lowest
from vestige.gradients.recompute import Recomputation
from vestige.gradients.refs import Ref, Source, Uncovered, does_not_fit, overlaps, tensors_in
from vestige.gradients.rows import Meeting, Rows, Summed
from vestige.gradients.rules import RULES
from vestige.gradients.rules.fallback import Fallback
from vestige.gradients.sharded_collector import collector_of
from vestige.gradients.shards import Shards
from vestige.gradients.tracker import Tracker
from vestige.gradients.uses import Use
from vestige.sampling.forward_randomness import LotStream
from vestige.sampling.loader import Batch


class Capture(Lowest, BackwardPass):
    """The clipped sums (or a geometry's) of one model, not yet attached to it."""

    def __init__(
        self,
        module: nn.Module,
        groups: Groups,
        clip: Clip,
        batch_first: bool = True,
        geometry: Geometry | None = None,
    ) -> None:
        Lowest.__init__(self)
        BackwardPass.__init__(self, collector_of(groups, clip, geometry), Tracker(module))
        self.module, self.groups = module, groups
        self.axis = 0 if batch_first else 1
        self.declared_mean = True  # how the loss joins its rows, while the self-check runs
        self.before_forward: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        # Of a sharded model: told before each of its passes what that is.
        self.meet: Callable[[int], None] | None = None
        self.passing: Callable[[], AbstractContextManager[None]] = nullcontext  # while one runs
        self.inside: list[str] = [f"{type(module).__name__} (root)"]  # where the forward pass is
        self.paused = False  # operations run as they are, uncaptured
        self.compiled: Callable[[], AbstractContextManager[None]] = nullcontext
        self.fallback, self._caches = Fallback(module), Caches(module)
        self.recomputation = Recomputation(self)
        self._sources = {id(slot.parameter): Source(slot, slot.parameter) for slot in groups.slots}
        self.shards = Shards(self)
        self._shared: dict[int, Source] = {}  # of the running forward pass
        self._batched_constants: set[str] = set()
        self._calls: list[bool] = []  # runs of the root under way, and whether they are watched
        self._open = ExitStack()
        self._stream: LotStream | None = None  # that the generators run on
        self._borrowed = ExitStack()  # gives them back
        self._state: list[tuple[int, int]] = []
        self._refused: PrivacyError | None = None  # what a pass that failed has kept
        self.handles: list[Any] = []  # of the hooks, while they are on the model
        self._calling = Interruptible(self)

    # -- attaching to the model -------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on the model."""
        enter, leave = Hook(self._enter_forward), Hook(self._leave_forward)
        self.handles = [
            self.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(leave, always_call=True),
        ]
        for norm in (part for part in self.tracker.parts if isinstance(part, _BatchNorm)):
            self.handles.append(norm.register_forward_pre_hook(Hook(refuse_training)))
        self._calling.put_on(self.module)
        for slot in self.groups.slots:
            self.handles.append(slot.parameter.register_hook(Guard(slot.name)))
        self.handles.append(self.shards.attach())

    def detach(self) -> None:
        """Take the hooks off again."""
        self.stop_watching()
        for handle in self.handles:
            handle.remove()
        self.handles.clear()
        self._calling.take_off(self.module)

    def start(self, batch: Batch) -> None:
        """The loader hands out `batch`."""
        self.stop_watching()
        self._calling.put_on(self.module)  # which compile() may have taken out
        self.batch, batch.record = batch, ForwardRecord()
        self.forget()

    def runs_row_by_row(self) -> bool:
        """Whether some module has no rule and runs one row at a time."""
        return bool(self.fallback.needed)

    @contextmanager
    def plainly(self) -> Iterator[None]:
        """The model as if nobody watched: for synthetic rows only."""
        self.paused = Guard.off = True
        try:
            with self._caches.off():
                yield
        finally:
            self.paused = Guard.off = False

    def stop_watching(self) -> None:
        """Leave a forward pass that was interrupted (Ctrl-C) and never said goodbye."""
        while self._calls:
            self._leave_forward(check=False)

    def _enter_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watched = torch.is_grad_enabled() and not self.paused
        stream = self.batch.stream if self.batch is not None else None
        if self.meet is not None:
            self.meet(2 if self.tracker.noting else int(torch.is_grad_enabled()))
        if watched and self._refused is not None:
            raise self._refused
        if watched and self._forward is None and self.before_forward is not None:
            self.before_forward(args, kwargs)
        self._calls.append(False)  # the leaving hook runs even if what follows raises
        if len(self._calls) == 1 and stream is not None:
            self._stream = stream
            self._borrowed.enter_context(stream.installed())
        if not watched:
            return
        if self._forward is None:
            refuse_around_the_model()
            rows = self.count_rows(args, kwargs)
            batch = self.batch if self.batch is not None and self.batch.rows == rows else None
            self._forward = Forward(rows, batch, batch.record if batch else ForwardRecord())
            self.tracker.begin(rows, (args, kwargs), self.axis, self.shards.passing)
            around = (self._caches.off(), self.fallback(self), self.recomputation.watching())
            for context in (*around, backward_code.watching(self)):
                self._open.enter_context(context)
            self._state = versions(self.tracker.parts, self.shards.passing)
        self._calls[-1] = True
        self.__enter__()

    @contextmanager
    def resumed(self, forward: Forward) -> Iterator[None]:
        """A forward pass goes on for a while, in the backward pass: a checkpointed block."""
        before, self._forward = self._forward, forward
        try:
            with self.fallback(self), backward_code.watching(self), self:
                yield
        finally:
            self._forward = before
            if before is None:
                self._shared.clear()

    def _leave_forward(
        self, _: Any = None, __: Any = None, out: Any = None, check: bool = True
    ) -> None:
        unwatched = self._calls == [False]  # the operations of others are looked at one by one
        try:
            try:
                self._end_forward(out, check)
            except PrivacyError as refused:
                if out is not None:
                    raise
                self._refused = refused  # the forward pass fails already: torch shows one error
            if check and unwatched and self._stream is not None:
                self._stream.check_seeds()
        finally:
            if not self._calls:
                self._stream = None
                self._borrowed.close()

    def _end_forward(self, out: Any, check: bool) -> None:
        if not self._calls or not self._calls.pop():
            return
        self.__exit__(None, None, None)
        if any(self._calls):
            return
        try:
            if check:
                self.tracker.check_kept()
                self._guard_outputs(out)
        finally:
            self._forward = None
            self._shared.clear()
            self._open.close()
            self.tracker.end()
        now = versions(self.tracker.parts, self.shards.passing) if check else self._state
        if now != self._state:
            changed = {key for key, _ in set(self._state) ^ set(now)}
            names = [name for name, tensor in self.state_tensors() if id(tensor) in changed]
            raise changed_by_forward(names[0] if names else "(a new one)")

    def _guard_outputs(self, out: Any) -> None:
        """What the model returns may enter the loss if its rows are the batch's, in their order."""
        for tensor in tensors_in(out):
            label = self.tracker.label(tensor) if tensor.requires_grad else None
            if isinstance(label, Rows) and label.order is not None and self.rows > 1:
                label = Meeting("a change of the rows' order that is not undone")
            if isinstance(label, Summed) and tensor.numel() > 1:
                label = Meeting("a sum over the batch that is no loss")
            if isinstance(label, Meeting):
                tensor.register_hook(Refusal(label))

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers and parameters: what a forward pass must leave as it is."""
        yield from self.module.named_buffers()
        yield from self.module.named_parameters()

    def count_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The rows of a call's first tensor that has a batch axis."""
        tensors = tensors_in((args, kwargs))
        return next((t.shape[self.axis] for t in tensors if t.ndim > self.axis), 0)

    # -- what rules use ---------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stream is not None:
            self._stream.watch(kwargs.get("generator"))
        if self.paused or self._forward is None:
            return func(*args, **kwargs)
        if func in FACTS:
            if func in LENGTHS:
                self.tracker.refuse_length(args[0])
            return func(*args, **kwargs)
        if func == backward_code.GRAD_FN:
            return backward_code.seen(func(*args))
        if func is torch.Tensor.__iter__:
            return iter(self.__torch_function__(torch.Tensor.unbind, types, args))
        before = self.tracker.before(args, kwargs)
        if func is torch.Tensor.register_hook:
            label = before[0].get(id(args[0]))
            if isinstance(label, Rows):
                args = (args[0], FollowedHook(args[1], self.tracker, label))
        rule = RULES.get(func) if torch.is_grad_enabled() else None
        try:
            out = NotImplemented if rule is None else rule(self, func, *args, **kwargs)
            ruled = out is not NotImplemented
            if not ruled:
                out = self._run_uncovered(func, args, kwargs)
        except Uncovered as use:
            use.locate(self.inside[-1])
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            explained = self._explained(error, func, args, kwargs)
            if explained is None:
                raise
            raise explained from error
        self.tracker.follow(func, before, args, kwargs, out, ruled)
        if self.recomputation.depth:
            self.recomputation.saw(func, kwargs, out)
        return out

    def _explained(self, error: Exception, func: Any, args: Any, kwargs: Any) -> ConfigError | None:
        """The error for arguments that torch does not take beside a parameter; None for others."""
        if isinstance(error, VestigeError | torch.OutOfMemoryError):
            return None
        # Whether a value is in range, synthetic rows cannot tell: the self-check is then skipped.
        if self.tracker.learning and isinstance(error, IndexError):
            return None
        given = list(tensors_in((args, kwargs)))
        names = [ref.slot.name for ref in map(self.find, given) if ref]
        operation = getattr(func, "__name__", str(func))
        return does_not_fit(f"{operation} with {names[0]!r}", given, error) if names else None

    def _run_uncovered(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        if not torch.is_grad_enabled():
            return out
        leaked = self._leaked(args, kwargs, out)
        if leaked is not None:
            name = getattr(func, "__name__", str(func))
            raise Uncovered(f"parameter {leaked.slot.name!r} is used by {name!r}")
        return out

    def find(self, value: Any) -> Ref | None:
        """The trainable parameter behind an argument, if it is one or a plain view of one."""
        if not isinstance(value, Tensor) or not value.requires_grad:
            return None
        source = self._source(value)
        if source is not None:
            return Ref(source, value.detach(), False)
        if value._base is None:
            return None
        source = self._source(value._base)
        if source is None:
            return None
        if value.dtype != source.tensor.dtype:
            raise Uncovered(f"parameter {source.slot.name!r} is used as {value.dtype}")
        if not source.tensor.is_contiguous() or overlaps(value):
            raise Uncovered(f"parameter {source.slot.name!r} is used through an overlapping view")
        return Ref(source, value.detach(), True)

    @property
    def watching(self) -> bool:
        """Whether a forward pass is under way whose rows are followed."""
        return self._forward is not None and not self.paused

    def stand_in(self, source: Source) -> None:
        """A tensor stands for a parameter while the model runs."""
        self._sources[id(source.tensor)] = source

    def _source(self, value: Tensor) -> Source | None:
        return self._sources.get(id(value)) or self._shared.get(id(value))

    def share(self, ref: Ref, value: Tensor, attribute: Callable[[Use], Use]) -> Tensor:
        """Let `value`, computed from `ref` alone, stand for it until it meets a batched tensor."""
        value.requires_grad_()
        value.register_hook(Guard(ref.slot.name))

        def through(use: Use) -> Use:  # also where `ref` is a view, or stands for another itself
            return ref.use(attribute(use))[1]

        self._shared[id(value)] = Source(ref.slot, value, through)
        return value

    def _leaked(self, args: Any, kwargs: Any, out: Any) -> Ref | None:
        ref = next((r for r in map(self.find, tensors_in((args, kwargs))) if r), None)
        if ref is None:
            return None
        for result in tensors_in(out):
            if result.requires_grad and self.find(result) is None:
                return ref
        return None

    def rows_in(
        self, value: Tensor, refs: Sequence[Ref | None], what: str, channels: int = 1
    ) -> Rows | None:
        """The rows of a tensor that meets `refs`; None for a constant.

        The last `channels` axes must not have them. A constant made in the forward pass (an initial
        state) has rows if the self-check, in which no other axis is as long as the batch, saw it
        have them where it met the same parameters.
        """
        label = self.tracker.label(value)
        if isinstance(label, Meeting):
            raise label.refusal()
        if isinstance(label, Summed):
            raise Meeting("a sum over the batch").refusal()
        if label is None:
            axis = self.axis if value.ndim > self.axis + channels else 0
            if value.ndim <= axis + channels or value.shape[axis] != self.rows:
                return None
            names = {ref.slot.name for ref in refs if ref}
            if self.tracker.learning:
                self._batched_constants |= names
            if not names <= self._batched_constants:
                return None
            return self.tracker.on_axis(value.shape, axis)
        if self.rows > 1:
            place = label.place(value.shape)
            if label.count == 1:
                raise Uncovered(f"{what} is given one row that was picked from the batch")
            if place is None:
                raise Uncovered(f"{what} is given rows that are spread over several axes")
            if place[0] >= value.ndim - channels:
                raise Meeting(f"{what!r}").refusal()
        return label

    def follows(self, rows: Rows, value: Tensor, out: Tensor) -> Rows:
        """Label `out`, which has its rows on the axis that `value` has them on."""
        place = rows.place(value.shape)
        label = rows if place is None else rows.at(out.shape, *place)
        self.tracker.give(out, label)
        return label
