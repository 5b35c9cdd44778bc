"""Sees the loss of every batch before backward starts, and what the model is given.

Autograd has no hook before a backward pass, and what the loss's operations have saved is freed as
the pass goes on. A torch function mode is told of `loss.backward()` by torch itself, so one is
active from the moment when the loader hands out a batch to the step, but not while the model runs.
It lies below all others on torch's stack of modes (above the default device's, which insists on
the bottom), so that a `with` block that the loop has open closes as if it were not there. It
changes no operation, and sees those that mix rows before the model or change outputs in place.
"""

from __future__ import annotations

import functools
import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._autograd import _get_sequence_nr
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from vestige.errors import PrivacyError
from vestige.gradients.backward_code import GRAD_FN, seen
from vestige.gradients.broadcasts import Operands
from vestige.gradients.capture import Capture
from vestige.gradients.hidden_writes import HiddenWrites
from vestige.gradients.hooks import Hook
from vestige.gradients.loop_constants import LoopConstants
from vestige.gradients.losses import LossGraph
from vestige.gradients.modes import collecting, put, refuse_unseen_code, taken
from vestige.gradients.nodes import below
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label
from vestige.sampling.loader import Batch

UNSEEN = "the loss could not be read: that no examples meet in it is unchecked"
UNFOLLOWED = (
    "what the loop makes of the inputs before the model could not be followed (numpy, torch.vmap, "
    "scripted functions, other libraries): that no examples meet there is unchecked"
)
PADDED = (
    "the rows of different lots had different shapes, which other records decide where rows are "
    "padded to the longest: unless the model ignores padding, epsilon does not hold (pad to a "
    "fixed length, by collate_fn=vestige.PadTo(LENGTH), or inside your own collate function by "
    "x = torch.nn.functional.pad(x, (0, LENGTH - x.shape[1])))"
)


@dataclass
class _Pass:
    """A forward pass under way."""

    first: int  # of its nodes
    open: bool  # whether the watch was on torch's stack before
    of_batch: bool = False
    quiet: bool = False  # of the batch, without gradients
    rows: Label | None = None  # what its outputs have


class LossWatch(TorchFunctionMode):
    """Reads the loss of each batch; `caveats` says what could not be read.

    Guarantee: a loss that is seen to couple rows is refused before its gradients flow.
    """

    def __init__(self, capture: Capture) -> None:
        super().__init__()
        self._capture = capture
        self._parameters = {id(p) for p in capture.module.parameters()}
        self._batch: Batch | None = None
        self._open = self._failed = self._asleep = False
        self._graph: Any = None  # alive as long as the graph of a loss that was not seen yet
        self._writes, self._operands = HiddenWrites(), Operands()
        self._constants = LoopConstants(capture.axis, self._made_of_outputs)
        self._inside: list[tuple[int, int]] = []
        self._elsewhere: list[tuple[int, int]] = []
        self._begun: list[_Pass] = []  # innermost last
        self._ends: list[Any] = []  # told when the loop lets go of the batch
        self._shapes: list[Any] = []  # of the first lot's rows, call by call
        self._calls = 0
        self._read = False
        self.unread = self.unfollowed = self.padded = False

    @property
    def caveats(self) -> list[str]:
        """What the reader of epsilon must know about losses and shapes."""
        inputs = [UNFOLLOWED] * self.unfollowed
        return [UNSEEN] * self.unread + inputs + [PADDED] * self.padded

    def attach(self) -> list[Any]:
        """Put hooks on the root module, around those of the capture."""
        _install()
        module, enter, leave = self._capture.module, Hook(self._enter), Hook(self._leave)
        return [
            module.register_forward_pre_hook(enter, prepend=True, with_kwargs=True),
            module.register_forward_hook(leave, always_call=True),
        ]

    def start(self, batch: Batch) -> None:
        """The loader hands out `batch`."""
        self.stop()
        self._batch, self._read, self._calls, self._failed = batch, False, 0, False
        self._graph, self._asleep = None, False
        self._operands.start(batch.rows, batch.unit_rows)
        self._constants.start(batch)
        self._inside.clear()
        self._writes.clear()
        self._begun.clear()
        self._elsewhere[:] = [(0, _get_sequence_nr())]  # earlier lots
        if self._constants.alive:
            watch = weakref.ref(self)
            self._ends = [weakref.ref(t, functools.partial(_ended, watch)) for t in batch.alive()]
            self._go_on(True)

    def stop(self) -> None:
        """The batch is done with: leave torch's stack of modes."""
        if self._batch is not None and self._batch.done and not self._read:
            self.unread = True
        self._batch = None
        if self._open:
            self._open = False
            _rearrange(None)

    # -- the model's forward pass -------------------------------------------------------------

    def _enter(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        batch, capture = self._batch, self._capture
        under_way = _Pass(_get_sequence_nr(), self._open)
        self._begun.append(under_way)
        self._asleep = False
        if batch is None or batch is not capture.batch:
            return
        if self._open:  # the model's operations are the capture's
            self._open = False
            _rearrange(None, self)
        refuse_unseen_code()
        if not torch.is_grad_enabled():
            under_way.quiet = True
            under_way.rows = self._constants.joined(tensors_in((args, kwargs)))
            return
        if kwargs.get("num_items_in_batch") is not None:
            raise PrivacyError(
                "the model is given num_items_in_batch, a count of all tokens of the batch that its"
                " loss is divided by, which couples the rows: leave it out, or make one loss per "
                "row from the logits and call engine.backward(losses)."
            )
        if capture.count_rows(args, kwargs) == batch.rows:
            under_way.of_batch = True
            if not batch.empty:
                self._note_shapes((args, kwargs))
                inputs = list(tensors_in((args, kwargs)))
                self._constants.check_inputs(inputs)
                self.unfollowed = self.unfollowed or self._constants.unknown(inputs)
                self._constants.give(tensors_in((args, kwargs)))

    @property
    def over(self) -> bool:
        """Whether there is nothing to wait for: a loop that broke off does not say so itself."""
        gone = self._graph() is None if self._graph is not None else not self._constants.alive
        return self._batch is None or self._failed or gone

    def _leave(self, _: Any, __: Any, output: Any) -> None:
        if not self._begun:
            return
        ended = self._begun.pop()
        if self._batch is None:
            return
        if output is None:  # the pass has failed
            self._go_on(ended.open)
            return
        if torch.is_grad_enabled():
            passes = self._inside if ended.of_batch else self._elsewhere
            passes.append((ended.first, _get_sequence_nr()))
        if ended.quiet and ended.rows is not None:
            self._constants.give(tensors_in(output), ended.rows)
        if ended.of_batch:
            life = _Life()
            self._graph = weakref.ref(life)
            self._writes.watch(tensors_in(output))
            self._constants.give(tensors_in(output))
            for tensor in tensors_in(output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.metadata["vestige life"] = life  # type: ignore[index]
        self._go_on(ended.open or ended.of_batch)

    def _go_on(self, watching: bool) -> None:
        """Watch the loop again, if it was watched before a forward pass."""
        if watching and not self._open:
            self._open = True
            _rearrange(self)

    def _note_shapes(self, given: Any) -> None:
        """Do rows keep their shape from lot to lot?"""
        axis = self._capture.axis
        rows = self._batch.rows if self._batch else 0
        shapes = [
            (*t.shape[:axis], *t.shape[axis + 1 :])
            for t in tensors_in(given)
            if t.ndim > axis and t.shape[axis] == rows
        ]
        if self._calls == len(self._shapes):
            self._shapes.append(shapes)
        self.padded = self.padded or self._shapes[self._calls] != shapes
        self._calls += 1

    # -- the loop -----------------------------------------------------------------------------

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._batch is None or self._asleep:
            return func(*args, **kwargs)
        constants = self._constants
        if func is Tensor.__iter__ and args[0].ndim:
            return iter(self.__torch_function__(Tensor.unbind, types, args))
        if func is Tensor.register_hook and self._made_of_outputs(args[0]):
            args, kwargs = (args[0], constants.hook(*args, **kwargs)), {}
        if func not in _STARTS:
            labels = constants.before(args, kwargs)
            if self._graph is None:  # nothing of the model's yet
                made = func(*args, **kwargs)
                constants.note(func, labels, args, kwargs, made)
                return made
            first = _get_sequence_nr()
            made = self._writes.call(func, args, kwargs)
            constants.note(func, labels, args, kwargs, made)
            self._operands.note(made, list(tensors_in((args, kwargs))), first)
            return seen(made) if func == GRAD_FN and labels else made
        try:
            self._check(args, kwargs)
            with self._capture.passing():
                made = func(*args, **kwargs)
            if func is torch.autograd.grad:
                constants.differentiate(args[1] if len(args) > 1 else kwargs["inputs"], made)
            return made
        except BaseException:
            self._failed = True
            raise

    def _made_of_outputs(self, tensor: Tensor) -> bool:
        """Whether a tensor is what the model gave for the batch, or was made of it."""
        try:
            made_by = tensor.grad_fn
        except RuntimeError:  # one of several views that was written to: it had a history
            return True
        if self._graph is None or made_by is None:
            return False

        def inside(node: Any) -> bool:
            number = node._sequence_nr()
            return any(first <= number < last for first, last in self._inside)

        return any(map(inside, below([made_by], lambda node: not inside(node))))

    def _check(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Read the losses that a backward pass is about to start from."""
        batch, capture = self._batch, self._capture
        assert batch is not None
        given = args[1] if len(args) > 1 else None
        for name in ("gradient", "grad_tensors", "grad_outputs"):
            given = kwargs.get(name, given)
        graph = LossGraph(
            batch.rows,
            capture.mean_loss,
            self._inside,
            self._elsewhere,
            self._parameters | capture.shards.passing,
            capture.axis,
            self._operands,
        )
        roots = [r for r in tensors_in(args[:1] or list(kwargs.values())[:1]) if graph.concerns(r)]
        if not roots:
            return  # of another model
        if capture.meet is not None:
            capture.meet(3)
        for root in roots:
            if not batch.empty:
                self._writes.check(functools.partial(graph.in_the_loop, root))
                graph.check(root)
                self._constants.check(graph.in_the_loop(root))
        self._read = True
        ones = all(g is None or _is_one(g) for g in tensors_in([given]))
        self.unread = self.unread or graph.unread is not None or not ones


_STARTS = {Tensor.backward, torch.autograd.backward, torch.autograd.grad}


def _is_one(gradient: Tensor) -> bool:
    return gradient.numel() == 1 and float(gradient) == 1


class _Life:
    """Lives as long as a graph."""


def _ended(watch: weakref.ref[LossWatch], _: Any) -> None:
    """The loop has let go of a tensor of the batch: has it broken off?

    A round of the garbage collector may begin where torch has just seen a mode and is about to take
    it: there the watch stays, asleep, until the model runs again or the next loop takes it away.
    """
    found = watch()
    if found is None or not found._open or not found.over:
        return
    if collecting():
        found._asleep = True
    else:
        _rearrange(None)


def _rearrange(entering: LossWatch | None, leaving: LossWatch | None = None) -> None:
    """Put a watch under all other modes of torch's stack, and take out those that are over."""
    stack = [m for m in taken() if m is not entering and m is not leaving]
    stack = [m for m in stack if not (isinstance(m, LossWatch) and m.over)]
    if entering is not None:
        stack.insert(1 if stack and _is_default_device(stack[0]) else 0, entering)
    put(stack)


def _is_default_device(mode: Any) -> bool:
    """Whether a mode is torch.set_default_device's, which looks for itself at the bottom.

    `with torch.device(...)` never enters its context: it takes whatever is on top when it ends.
    """
    return isinstance(mode, DeviceContext) and hasattr(mode, "old_device")


@functools.cache
def _install() -> None:
    """Let `zero_grad`, which looks at every parameter and at no rows, pass no function mode."""
    for owner in (torch.optim.Optimizer, nn.Module):
        plain = owner.zero_grad

        def zero_grad(self: Any, *args: Any, __plain: Any = plain, **kwargs: Any) -> None:
            with torch._C.DisableTorchFunction():
                __plain(self, *args, **kwargs)

        owner.zero_grad = functools.wraps(plain)(zero_grad)  # type: ignore[method-assign]
