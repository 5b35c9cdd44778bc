"""torch.utils.checkpoint inside a model: what is recomputed in the backward pass is the same
forward pass.

Non-reentrant checkpointing forgets what autograd saved inside a block and runs the block again when
the backward pass asks for it. The second run must save the same tensors, so it runs by the same
rules as the first, with the labels that the block's inputs had. It attributes nothing: the uses of
the first run stand, and their inputs come from the second through autograd's own memory.

torch calls the block by one function in both forms of checkpointing. While a watched forward pass
runs, that function is wrapped; the wrapper does nothing for the operations of other threads.
Reentrant checkpointing hides the block's operations from the first run and is refused.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import checkpoint

from vestige.errors import PrivacyError, UnsupportedModel
from vestige.gradients.refs import tensors_in

if TYPE_CHECKING:
    from vestige.gradients.backward import Forward
    from vestige.gradients.capture import Capture


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

    @contextmanager
    def watching(self) -> Iterator[None]:
        """While entered, blocks that are checkpointed in this thread are run again by the rules."""
        thread, run_block = (
            threading.get_ident(),
            checkpoint._checkpoint_without_reentrant_generator,
        )

        def run(
            block: Callable[..., Any], preserve: Any, context: Any, *rest: Any, **kwargs: Any
        ) -> Any:
            if threading.get_ident() != thread or not torch.is_grad_enabled():
                return run_block(block, preserve, context, *rest, **kwargs)
            same = self._same(block, (rest[_SETTINGS:], kwargs))
            return self._counted(run_block(same, preserve, context, *rest, **kwargs))

        with _in_place_of_torchs(run):
            yield

    def _counted(self, running: Any) -> Iterator[None]:
        """The block's first run, which torch brackets by this generator."""
        self.depth += 1
        try:
            yield from running
        finally:
            self.depth -= 1

    def _same(self, block: Callable[..., Any], inputs: Any) -> Callable[..., Any]:
        """The block as it is run again: by the rules, its inputs labelled as they are now."""
        capture = self._capture
        tracker, forward = capture.tracker, capture.forward
        labels = [tracker.mark(tensor) for tensor in tensors_in(inputs)]

        def again(*args: Any, **kwargs: Any) -> Any:
            with self._second_run(forward):
                for tensor, label in zip(tensors_in((args, kwargs)), labels, strict=True):
                    tracker.put_back(tensor, label)
                return block(*args, **kwargs)

        return again

    @contextmanager
    def _second_run(self, forward: Forward) -> Iterator[None]:
        capture = self._capture
        if forward.batch is not capture.batch:
            raise PrivacyError(
                "backward through a checkpoint of a batch that is not the one the private loader "
                "handed out last: call backward before the next batch is taken."
            )
        tracker = capture.tracker
        before = tracker.again, self.depth
        tracker.again, self.depth = True, 1
        try:
            with capture.resumed(forward), self.watching():
                yield
        finally:
            tracker.again, self.depth = before


@contextmanager
def without_checkpoints() -> Iterator[None]:
    """While entered, blocks run once and keep what they save: the self-check's few rows."""

    def run(*_: Any, **__: Any) -> Iterator[None]:
        yield

    with _in_place_of_torchs(run):
        yield


@contextmanager
def _in_place_of_torchs(run: Callable[..., Any]) -> Iterator[None]:
    """Both forms of torch.utils.checkpoint, while entered."""
    names = {"_checkpoint_without_reentrant_generator": run, "CheckpointFunction": _Reentrant}
    before = {name: getattr(checkpoint, name) for name in names}
    for name, mine in names.items():
        setattr(checkpoint, name, mine)
    try:
        yield
    finally:
        for name, theirs in before.items():
            setattr(checkpoint, name, theirs)


def refuse_around_the_model() -> None:
    """A checkpoint around the whole model would run the model's own hooks again, too."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is not None and "checkpoint" in getattr(hooks[0], "__module__", ""):
        raise UnsupportedModel(
            "the private model as a whole is inside torch.utils.checkpoint: checkpoint blocks "
            "inside its forward instead, where they are run again by the same rules."
        )


class _Reentrant:
    """In the place of torch's reentrant form."""

    @staticmethod
    def apply(*_: Any) -> Any:
        """Refuse: its first run hides the block from the rules."""
        raise UnsupportedModel(
            "a block is checkpointed with use_reentrant=True, which hides its operations from the "
            "rules for per-example gradients: use checkpoint(..., use_reentrant=False), or "
            "gradient_checkpointing_enable({'use_reentrant': False})."
        )


_SETTINGS = 3  # determinism_check, debug and early_stop stand before the block's own arguments
