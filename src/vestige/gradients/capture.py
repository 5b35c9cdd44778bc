"""Watches a model's forward pass and turns its backward pass into clipped sums.

A torch function mode is active while the root module runs. It sees every operation by name, so
attention blocks, tied weights, functional code and layers called twice need no module rule. An
operation that a rule covers runs with the parameter detached, so autograd gives that parameter no
gradient; the rule turns the operation's input and output gradient into a `Use` instead. Any other
way for a gradient to reach a parameter is refused: by name in the forward pass, and by a hook on
the parameter itself for what the mode did not see.

The model stays the user's own object: two hooks on the root and one on each parameter, which are
not copied by `copy.deepcopy` or `torch.save`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from vestige.errors import ConfigError, PrivacyError, UnsupportedModel, VestigeError
from vestige.forward_randomness import LotStream, untouched
from vestige.gradients.collector import Collector, ForwardRecord
from vestige.gradients.refs import (
    Layout,
    Ref,
    Source,
    Uncovered,
    does_not_fit,
    overlaps,
    tensors_in,
)
from vestige.gradients.uses import PerExample, Use
from vestige.groups import Slot

Uses = list[tuple[Slot, Use]]
Rule = Callable[["Capture", Any, tuple[Any, ...], dict[str, Any]], Any]


@dataclass
class Batch:
    """One physical batch handed out by the private loader, and what has become of it."""

    rows: int
    empty: bool = False  # the lot is empty: the one row is a stand-in and contributes nothing
    last: bool = True  # the lot's last physical batch
    lot: int = 0
    measures: bool = False  # part of a pass over all records that releases one number
    stream: LotStream | None = None  # what the lot's forward passes draw; None for synthetic rows
    record: ForwardRecord = field(default_factory=ForwardRecord)
    backward: int | None = None  # the autograd pass that brings its gradients
    done: bool = False


@dataclass
class Forward:
    """One run of the root module."""

    rows: int
    batch: Batch | None
    record: ForwardRecord
    ragged: bool = False  # positions were picked by the data: rows can no longer be unfolded


@contextmanager
def exact(device: str) -> Iterator[None]:
    """No gradients and no autocast: norms and sums keep their own precision."""
    with torch.no_grad():
        if not torch.is_autocast_enabled(device):
            yield
            return
        with torch.autocast(device, enabled=False):
            yield


class _Tap(torch.autograd.Function):
    """Lets the output gradient be seen where autograd would not compute one (a first layer)."""

    @staticmethod
    def forward(ctx: Any, out: Tensor, anchor: Tensor, site: Callable[[Tensor], None]) -> Tensor:
        ctx.site = site
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None]:
        ctx.site(g)
        return None, None, None


class _Lift(torch.autograd.Function):
    """A parameter repeated for every row, so that autograd returns one gradient per row."""

    @staticmethod
    def forward(
        ctx: Any, value: Tensor, size: Sequence[int], anchor: Tensor, site: Callable[[Tensor], None]
    ) -> Tensor:
        ctx.site = site
        return value.expand(size).clone() if value.numel() == 0 else value.expand(size)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[None, None, None, None]:
        ctx.site(g)
        return None, None, None, None


class Capture(TorchFunctionMode):
    """The per-example gradients of one model, gathered by `collector`."""

    def __init__(
        self,
        module: nn.Module,
        collector: Collector,
        rules: Mapping[Any, Rule],
        fallback: Callable[[Capture], AbstractContextManager[None]],
        batch_first: bool = True,
    ) -> None:
        super().__init__()
        groups = collector.groups
        self.module, self.groups, self.collector = module, groups, collector
        self._rules, self._fallback = rules, fallback
        self.axis = 0 if batch_first else 1
        self.batch: Batch | None = None
        self.mean_loss = True
        self.weight = 1.0  # of this pass, where a batch's gradient is a combination of two
        self.before_forward: Callable[[tuple[Any, ...], dict[str, Any]], None] | None = None
        self._sources = {id(slot.parameter): Source(slot, slot.parameter) for slot in groups.slots}
        self._shared: dict[int, Source] = {}  # of the running forward pass
        self._anchor = torch.zeros((), requires_grad=True, device=collector.total.device)
        self._device = collector.total.device.type
        self._forward: Forward | None = None
        self._calls: list[bool] = []  # runs of the root under way, and whether they are watched
        self.inside: list[str] = [f"{type(module).__name__} (root)"]  # where the forward pass is
        self._open = ExitStack()
        self._stream: LotStream | None = None  # that the generators run on
        self._borrowed = ExitStack()  # gives them back
        self._state: list[tuple[int, int]] = []
        self._parts = list(module.modules())
        self.paused = False  # operations run as they are, uncaptured
        self.unfold = False  # rows flattened with positions may be unfolded
        self.learning = False  # the self-check runs: note which constants have batch rows
        self._batched_constants: set[str] = set()
        self._token = 0
        self._handles: list[Any] = []

    # -- attaching to the model -------------------------------------------------------------

    def attach(self) -> None:
        """Put the hooks on the model."""
        enter, leave = _Hook(self._enter_forward), _Hook(self._leave_forward)
        self._handles = [
            self.module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            self.module.register_forward_hook(leave, always_call=True),
        ]
        if self.module._compiled_call_impl is None:
            self.module._compiled_call_impl = _Interruptible(self)
        for slot in self.groups.slots:
            self._handles.append(slot.parameter.register_hook(_Guard(slot.name)))

    def detach(self) -> None:
        """Take the hooks off again."""
        self.stop_watching()
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if isinstance(self.module._compiled_call_impl, _Interruptible):
            self.module._compiled_call_impl = None

    def start(self, batch: Batch) -> None:
        """The loader hands out `batch`."""
        self.stop_watching()
        self.batch = batch

    def reopen(self) -> None:
        """The batch at hand may have one more backward pass: its gradients were taken care of."""
        assert self.batch is not None
        self.batch.backward, self.batch.done = None, False
        self.batch.record = ForwardRecord()

    def stop_watching(self) -> None:
        """Leave a forward pass that was interrupted (Ctrl-C) and never said goodbye."""
        while self._calls:
            self._leave_forward(check=False)

    def _enter_forward(self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        watched = torch.is_grad_enabled() and not self.paused
        stream = self.batch.stream if self.batch is not None else None
        if watched and self._forward is None and self.before_forward is not None:
            with untouched(stream):
                self.before_forward(args, kwargs)
        self._calls.append(False)  # the leaving hook runs even if what follows raises
        if len(self._calls) == 1 and stream is not None:
            self._stream = stream
            self._borrowed.enter_context(stream.installed())
        if not watched:
            return
        if self._forward is None:
            rows = self.count_rows(args, kwargs)
            batch = self.batch if self.batch is not None and self.batch.rows == rows else None
            self._forward = Forward(rows, batch, batch.record if batch else ForwardRecord())
            self._token += 1
            self.mark((args, kwargs))
            self._open.enter_context(self._fallback(self))
            self._state = self._versions()
        self._calls[-1] = True
        self.__enter__()  # type: ignore[no-untyped-call]

    def _leave_forward(self, *_: Any, check: bool = True) -> None:
        unwatched = self._calls == [False]  # the operations of others are looked at one by one
        try:
            self._end_forward(check)
            if check and unwatched and self._stream is not None:
                self._stream.check_seeds()
        finally:
            if not self._calls:
                self._stream = None
                self._borrowed.close()

    def _end_forward(self, check: bool) -> None:
        if not self._calls or not self._calls.pop():
            return
        self.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        if any(self._calls):
            return
        self._forward = None
        self._shared.clear()
        self._open.close()
        now = self._versions() if check else self._state
        if now != self._state:
            changed = {key for key, _ in set(self._state) ^ set(now)}
            names = [name for name, tensor in self.state_tensors() if id(tensor) in changed]
            raise changed_by_forward(names[0] if names else "(a new one)")

    def _versions(self) -> list[tuple[int, int]]:
        """Identity and version of every buffer and parameter, without looking up their names."""
        return [
            (id(tensor), tensor._version)
            for module in self._parts
            for tensor in (*module._buffers.values(), *module._parameters.values())
            if tensor is not None
        ]

    def state_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Buffers and parameters: what a forward pass must leave as it is."""
        yield from self.module.named_buffers()
        yield from self.module.named_parameters()

    def count_rows(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
        """The rows of a call's first tensor that has a batch axis."""
        for tensor in tensors_in((args, kwargs)):
            if tensor.ndim > self.axis:
                return tensor.shape[self.axis]
        return 0

    # -- what rules use ---------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._stream is not None:
            self._stream.watch(kwargs.get("generator"))
        if self.paused or self._forward is None or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        rule = self._rules.get(func)
        try:
            out = NotImplemented if rule is None else rule(self, func, args, kwargs)
            if out is NotImplemented:
                out = self._run_uncovered(func, args, kwargs)
        except Uncovered as use:
            use.locate(self.inside[-1])
            raise
        except (RuntimeError, IndexError, ValueError) as error:
            explained = self._explained(error, func, args, kwargs)
            if explained is None:
                raise
            raise explained from error
        if self._comes_from_batch(args) or (kwargs and self._comes_from_batch(kwargs)):
            self.mark(out)
        return out

    def _explained(self, error: Exception, func: Any, args: Any, kwargs: Any) -> ConfigError | None:
        """The error for arguments that torch does not take beside a parameter; None for others."""
        if isinstance(error, VestigeError | torch.OutOfMemoryError):
            return None
        # Whether a value is in range, synthetic rows cannot tell: the self-check is then skipped.
        if self.learning and isinstance(error, IndexError):
            return None
        given = list(tensors_in((args, kwargs)))
        names = [ref.slot.name for ref in map(self.find, given) if ref]
        operation = getattr(func, "__name__", str(func))
        return does_not_fit(f"{operation} with {names[0]!r}", given, error) if names else None

    def _comes_from_batch(self, values: Any) -> bool:
        for value in values.values() if isinstance(values, dict) else values:
            if isinstance(value, Tensor):
                if self.is_marked(value):
                    return True
            elif isinstance(value, tuple | list | dict) and self._comes_from_batch(value):
                return True
        return False

    def _run_uncovered(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        leaked = self._leaked(args, kwargs, out)
        if leaked is not None:
            name = getattr(func, "__name__", str(func))
            raise Uncovered(f"parameter {leaked.slot.name!r} is used by {name!r}")
        return out

    @property
    def rows(self) -> int:
        """The number of rows of the running forward pass."""
        assert self._forward is not None
        return self._forward.rows

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
        if not source.tensor.is_contiguous() or overlaps(value):
            raise Uncovered(f"parameter {source.slot.name!r} is used through an overlapping view")
        return Ref(source, value.detach(), True)

    def _source(self, value: Tensor) -> Source | None:
        return self._sources.get(id(value)) or self._shared.get(id(value))

    def share(self, ref: Ref, value: Tensor, attribute: Callable[[Use], Use]) -> Tensor:
        """Let `value`, computed from `ref` alone, stand for it until it meets a batched tensor."""
        value.requires_grad_()
        value.register_hook(_Guard(ref.slot.name))
        self._shared[id(value)] = Source(ref.slot, value, attribute)
        return value

    def _leaked(self, args: Any, kwargs: Any, out: Any) -> Ref | None:
        ref = next((r for r in map(self.find, tensors_in((args, kwargs))) if r), None)
        if ref is None:
            return None
        for result in tensors_in(out):
            if result.requires_grad and self.find(result) is None:
                return ref
        return None

    def tap(
        self, out: Tensor, refs: Sequence[Ref | None], uses: Callable[[Tensor], Uses]
    ) -> Tensor:
        """Have `uses(g)` called with the gradient of `out`, an operation that used `refs`."""
        site = self._site([ref.slot for ref in refs if ref], uses)
        if out.requires_grad:
            out.register_hook(site)
            return out
        return _Tap.apply(out, self._anchor, site)  # type: ignore[no-any-return, no-untyped-call]

    def lift(self, ref: Ref, size: Sequence[int], axis: int) -> Tensor:
        """`ref` repeated for every row along `axis`, its gradients captured one row at a time."""
        shape = ref.value.shape

        def uses(g: Tensor) -> Uses:
            rows = g.movedim(axis, 0).reshape(-1, *shape)
            return [ref.use(PerExample(rows.to(self.collector.total.dtype)))]

        pad = [1] * (len(size) - len(shape))
        value = ref.value.reshape(*pad, *shape)
        lifted: Tensor = _Lift.apply(value, size, self._anchor, self._site([ref.slot], uses))  # type: ignore[no-untyped-call]
        self.mark(lifted)
        return lifted

    def _site(self, slots: list[Slot], uses: Callable[[Tensor], Uses]) -> Callable[[Tensor], None]:
        forward = self._forward
        assert forward is not None
        forward.record.note(slots)

        def arrive(g: Tensor) -> None:
            with exact(self._device):
                self._arrive(forward, uses, g.detach())

        return arrive

    def saved(self, value: Tensor) -> Callable[[], Tensor]:
        """Keep an operation's input for the backward pass, refusing if it is changed in between."""
        kept, version = value.detach(), value._version

        def get() -> Tensor:
            if kept._version != version:
                raise PrivacyError(
                    "a layer's input was changed by an in-place operation before the backward "
                    "pass, so its gradient cannot be computed: use the out-of-place form."
                )
            return kept

        return get

    def mark(self, values: Any) -> None:
        """These tensors come from the batch. (A shape alone does not say so: a table of positions
        may happen to have as many rows as a lot.)"""
        for tensor in tensors_in(values):
            tensor._vestige_rows = self._token  # type: ignore[attr-defined]

    def is_marked(self, value: Tensor) -> bool:
        """Whether a tensor was computed from the batch."""
        return getattr(value, "_vestige_rows", None) == self._token

    def is_batched(self, value: Tensor, refs: Sequence[Ref | None], channels: int = 1) -> bool:
        """Whether `value`, which meets `refs`, has the rows as an axis or flattened with another.

        A constant made in the forward pass (an initial state) counts only if the self-check saw
        it have batch rows where it met the same parameters.
        """
        assert self._forward is not None
        axis = self.axis if value.ndim > self.axis + channels else 0
        if not self.is_marked(value):
            names = {ref.slot.name for ref in refs if ref}
            if self.learning and value.ndim > axis and value.shape[axis] == self.rows:
                self._batched_constants |= names
            if not names <= self._batched_constants:
                return False
        if value.ndim > axis and value.shape[axis] == self.rows:
            return True
        flattened = value.ndim == 2 and self.rows > 0 and value.shape[0] % self.rows == 0
        return flattened and self.unfold and not self._forward.ragged

    def pick_positions(self) -> None:
        """The forward pass picks positions by their content, so examples differ in number."""
        assert self._forward is not None
        self._forward.ragged = True

    def layout(self) -> Layout:
        """Where the rows are in the tensors of the operation at hand."""
        return Layout(self.rows, self.axis, self.collector.total.dtype)

    # -- the backward pass ------------------------------------------------------------------

    def _arrive(self, forward: Forward, uses: Callable[[Tensor], Uses], g: Tensor) -> None:
        batch = forward.batch
        if batch is None or batch is not self.batch:
            raise PrivacyError(
                "backward on a batch that is not the one the private loader handed out last: "
                "iterate over the loader that make_private returned, pass each of its batches "
                "whole through the model, and evaluate other data under torch.no_grad()."
            )
        task = torch._C._current_graph_task_id()
        if batch.done or (batch.backward is not None and batch.backward != task):
            raise PrivacyError(
                "a second backward on the same batch: its examples would count twice, up to 2C. "
                "Add the losses up and call backward once for every batch. (After a backward that "
                "failed, engine.abandon_lot() gives the lot up.)"
            )
        if batch.backward is None:
            batch.backward = task
            self.collector.begin(float(batch.rows) if self.mean_loss else 1.0)
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not batch.empty:
            self.collector.arrive(forward.record, uses(g if self.weight == 1 else g * self.weight))

    def _end_backward(self) -> None:
        assert self.batch is not None
        with exact(self._device):
            self.collector.finish()
        self.batch.done = True


def changed_by_forward(name: str) -> PrivacyError:
    """The error for a buffer or parameter that the forward pass writes to."""
    return PrivacyError(
        f"buffer or parameter {name!r} was changed by the forward pass. Statistics of private "
        "batches are an unprotected release: use vestige.fix(model) for batch norm, turn the "
        "tracking off (track_running_stats=False), or move the update out of the model."
    )


class _Hook:
    """A bound method as a hook that turns into a no-op when the model is copied or pickled."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, memo: Any) -> Callable[..., None]:
        return do_nothing

    def __reduce__(self) -> Any:
        return _nothing, ()


class _Interruptible:
    """How the root is called: Ctrl-C runs none of torch's hooks, so the forward is left here.

    torch keeps this attribute out of copies and pickles.
    """

    def __init__(self, capture: Capture) -> None:
        self._capture = capture

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return self._capture.module._call_impl(*args, **kwargs)
        except Exception:
            raise  # the hooks have run
        except BaseException:
            self._capture.stop_watching()
            raise

    def __deepcopy__(self, memo: Any) -> None:
        return None


def do_nothing(*_: Any) -> None:
    """What a copied model has in place of the capture's hooks."""


def _nothing() -> Callable[..., None]:
    return do_nothing


class _Guard:
    """Refuses a gradient that reaches a parameter without having gone through a rule."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, _: Tensor) -> None:
        raise UnsupportedModel(
            f"parameter {self.name!r} received a gradient that was not captured per example. It "
            "was used outside the model's forward call (call the model itself, not its parts), in "
            "a regularisation term of the loss (use the optimizer's weight_decay), under gradient "
            "checkpointing or torch.compile, or by an operation that Vestige does not see."
        )
