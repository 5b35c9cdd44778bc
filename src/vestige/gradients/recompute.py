"""torch.utils.checkpoint inside a model: what is recomputed in the backward pass is the same
forward pass.

Non-reentrant checkpointing forgets what autograd saved inside a block and runs the block again when
the backward pass asks for it. The second run must save the same tensors, so it runs by the same
rules as the first, with the labels that the block's inputs had and the random numbers of the lot.
It attributes nothing: the uses of the first run stand, and their inputs come from the second
through autograd's own memory. That is right only if both runs agree row by row. So the second run
is held against the first, operation by operation, and what could make them differ is refused: other
contents of an input, and inside a block an in-place change of whose rows a tensor has.

torch calls the block by one function in both forms of checkpointing. That function is replaced once
by one that asks whether a watched forward pass runs in this thread; otherwise it is torch's own.
Reentrant checkpointing hides the block's operations from the first run and is refused.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from vestige.errors import PrivacyError, UnsupportedModel
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Rows

if TYPE_CHECKING:
    from vestige.gradients.backward import Forward
    from vestige.gradients.capture import Capture

_SETTINGS = 3  # determinism_check, debug and early_stop stand before the block's own arguments
_THREAD = threading.local()  # `handlers`: what runs blocks in this thread, the innermost last
Seen = tuple[Any, list[Label | None]]  # an operation, and whose rows its results have


class Held(torch.autograd.Function):
    """Keeps an input the way autograd keeps its own: inside a checkpoint it is recomputed."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor) -> Tensor:
        """A stand-in whose node holds `value`."""
        ctx.save_for_backward(value)
        return anchor.detach()

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[None, None]:
        """Nobody asks for the stand-in's gradient."""
        return None, None


class Recomputation:
    """The checkpointed blocks of one model."""

    def __init__(self, capture: Capture) -> None:
        self._capture = capture
        self.depth = 0  # blocks that are running, one in the other
        self._first: list[list[Seen]] = []  # what each running block does, for its second run
        self._second: list[Iterator[Seen]] = []  # what it did, where this is the second

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, blocks that are checkpointed in this thread are run again by the rules."""

        def run(
            block: Callable[..., Any], preserve: Any, context: Any, *rest: Any, **kwargs: Any
        ) -> Any:
            if _plain in _handlers():
                return _plain()
            if not torch.is_grad_enabled():
                return _torchs(block, preserve, context, *rest, **kwargs)
            done: list[Seen] = []
            same = self._same(block, (rest[_SETTINGS:], kwargs), done)
            return self._counted(_torchs(same, preserve, context, *rest, **kwargs), done)

        with _handling(run):
            yield

    def _counted(self, running: Any, done: list[Seen]) -> Iterator[None]:
        """The block's first run, which torch brackets by `running`."""
        next(running)  # torch's own preparations
        try:
            with self._first_run(done):
                yield
        except BaseException as error:
            running.throw(error)
            raise
        with suppress(StopIteration):
            next(running)

    @contextmanager
    def _first_run(self, done: list[Seen]) -> Iterator[None]:
        tracker, before = self._capture.tracker, (self.depth, self._capture.tracker.guard)
        self.depth, tracker.guard = self.depth + 1, self._check_rows_stay
        self._first.append(done)
        try:
            yield
        finally:
            self._first.pop()
            self.depth, tracker.guard = before

    def _same(self, block: Callable[..., Any], inputs: Any, done: list[Seen]) -> Callable[..., Any]:
        """The block as it is run again: by the rules, its inputs labelled as they are now."""
        capture = self._capture
        tracker, forward = capture.tracker, capture.forward
        given = list(tensors_in(inputs))
        versions = [tensor._version for tensor in given]
        labels = [(tracker.has_label(t), tracker.label(t)) for t in given]
        stream = forward.batch.stream if forward.batch else None
        position = stream.position() if stream else nullcontext

        def again(*args: Any, **kwargs: Any) -> Any:
            if [tensor._version for tensor in given] != versions:
                raise PrivacyError(
                    "an input of a checkpointed block was changed in place between the forward and "
                    "the backward pass, so that the block would see other rows the second time: "
                    "use the out-of-place form."
                )
            for tensor, (known, label) in zip(tensors_in((args, kwargs)), labels, strict=True):
                if known:
                    tracker.give(tensor, label)
            with position(), self._second_run(forward, done):
                return block(*args, **kwargs)

        return again

    @contextmanager
    def _second_run(self, forward: Forward, done: list[Seen]) -> Iterator[None]:
        capture = self._capture
        if forward.batch is not capture.batch:
            raise PrivacyError(
                "backward through a checkpoint of a batch that is not the one the private loader "
                "handed out last: call backward before the next batch is taken."
            )
        tracker = capture.tracker
        before = tracker.again, self.depth, tracker.guard
        tracker.again, self.depth, tracker.guard = True, 1, self._check_rows_stay
        self._second.append(iter(done))
        try:
            with capture.resumed(forward), self.watching():
                yield
        finally:
            self._second.pop()
            tracker.again, self.depth, tracker.guard = before

    # -- while a block runs -----------------------------------------------------------------

    def saw(self, func: Any, kwargs: dict[str, Any], out: Any) -> None:
        """After an operation: note it for the second run of its block, or hold it against the
        first."""
        if kwargs.get("generator") is not None:
            raise UnsupportedModel(
                "a block inside torch.utils.checkpoint draws from a torch.Generator of its own, "
                "which the block's second run could not draw from in secret: use torch's own "
                "random numbers there (no generator=)."
            )
        tracker = self._capture.tracker
        labels = [tracker.label(t) if tracker.has_label(t) else None for t in tensors_in(out)]
        if not labels:
            return
        for done in self._first:
            done.append((func, labels))
        for expected in self._second:
            if not _agree(next(expected, None), (func, labels)):
                raise PrivacyError(
                    "a block inside torch.utils.checkpoint does something else when it is run "
                    "again in the backward pass: its rows could not be told apart. Make what it "
                    "does a function of its inputs alone, or do not checkpoint it."
                )

    def _check_rows_stay(self, tensor: Tensor, label: Label | None) -> None:
        """Before a tensor is labelled: one that was written to keeps its rows.

        Its earlier contents, which an operation may have saved, are those of the second run, and
        nobody sees there that they were overwritten.
        """
        tracker = self._capture.tracker
        earlier = tracker.earlier(tensor)
        if isinstance(earlier, Rows) and not (isinstance(label, Rows) and label.same(earlier)):
            raise PrivacyError(
                "an in-place operation inside a torch.utils.checkpoint block changes whose rows a "
                "tensor has: use the out-of-place form, or do not checkpoint that block."
            )


def _agree(expected: Seen | None, seen: Seen) -> bool:
    """Whether both runs did the same, to the same rows."""
    if expected is None or expected[0] != seen[0] or len(expected[1]) != len(seen[1]):
        return False
    for one, other in zip(expected[1], seen[1], strict=True):
        if type(one) is not type(other) or (
            isinstance(one, Rows) and isinstance(other, Rows) and not one.same(other)
        ):
            return False
    return True


# -- in torch's place -------------------------------------------------------------------------


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """While entered, blocks run once and keep what they save: the self-check's few rows."""
    with _handling(_plain):
        yield


def _plain(*_: Any, **__: Any) -> Iterator[None]:
    yield


def _handlers() -> list[Callable[..., Any]]:
    if not hasattr(_THREAD, "handlers"):
        _THREAD.handlers = []
    handlers: list[Callable[..., Any]] = _THREAD.handlers
    return handlers


@contextmanager
def _handling(run: Callable[..., Any]) -> Iterator[None]:
    """While entered, `run` brackets the blocks of this thread."""
    handlers = _handlers()
    handlers.append(run)
    try:
        yield
    finally:
        handlers.remove(run)


_torchs = checkpoint._checkpoint_without_reentrant_generator


@functools.wraps(_torchs)
def _dispatched(*args: Any, **kwargs: Any) -> Any:
    handlers = _handlers()
    return (handlers[-1] if handlers else _torchs)(*args, **kwargs)


class _Reentrant(checkpoint.CheckpointFunction):
    """torch's reentrant form, which is refused while a private model runs in this thread."""

    @classmethod
    def apply(cls, *args: Any, **kwargs: Any) -> Any:
        """As torch's, or the refusal: its first run hides the block from the rules."""
        if _handlers():
            raise UnsupportedModel(
                "a block is checkpointed with use_reentrant=True, which hides its operations from "
                "the rules for per-example gradients: use checkpoint(..., use_reentrant=False), or "
                "gradient_checkpointing_enable({'use_reentrant': False})."
            )
        return _torchs_reentrant.apply(*args, **kwargs)


_torchs_reentrant = checkpoint.CheckpointFunction
checkpoint._checkpoint_without_reentrant_generator = _dispatched
checkpoint.CheckpointFunction = _Reentrant  # type: ignore[misc]
