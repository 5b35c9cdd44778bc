"""The backward pass: output gradients arrive where operations were tapped, and become uses.

`tap` and `lift` are called by rules in the forward pass. In the backward pass autograd hands them
an output gradient, from which the rule makes the uses of its parameters; the collector clips them.
Every batch has one backward pass, that of the batch which the loader handed out last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor

from vestige.errors import PrivacyError
from vestige.gradients.collector import Collector, ForwardRecord
from vestige.gradients.groups import Slot
from vestige.gradients.hooks import do_nothing
from vestige.gradients.kernels import fused
from vestige.gradients.recompute import Held, Recomputation
from vestige.gradients.refs import Ref
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import Uses
from vestige.gradients.tracker import Tracker
from vestige.gradients.units import Fold
from vestige.gradients.uses import PerExample, row_squares
from vestige.sampling.loader import Batch


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


class _Kept:
    """What an operation needs in the backward pass, until that is over: whoever keeps the loss
    keeps its graph, which alone holds this."""

    def __init__(self, uses: Callable[[Tensor], Uses]) -> None:
        self.uses: Callable[[Tensor], Uses] | None = uses


@dataclass
class Forward:
    """One run of the root module."""

    rows: int
    batch: Batch | None
    record: ForwardRecord
    # What must not change before the backward pass, where a compiled graph may read it.
    versions: list[tuple[Tensor, int]] = field(default_factory=list)


def _not_of_the_batch(forward: Forward | None, batch: Batch | None) -> PrivacyError:
    counts = ""
    if forward is not None and batch is not None and forward.rows != batch.rows:
        counts = f" (the model was given {forward.rows} rows, and the batch has {batch.rows})"
    return PrivacyError(
        f"backward on a batch that is not the one the private loader handed out last{counts}: "
        "iterate over the loader that make_private returned, pass each of its batches whole "
        "through the model (max_physical_batch_size= makes pieces of a lot, views= and augment= "
        "make views of its records), and evaluate other data under torch.no_grad(). Where another "
        "model learns from this one (a GAN's generator), let it learn from a copy, at a public "
        "size: copy.deepcopy(model)(generator(torch.randn(BATCH_SIZE, ...))). Where gradients of "
        "inputs alone are wanted, freeze this one meanwhile: model.requires_grad_(False)."
    )


class BackwardPass:
    """Takes output gradients of the batch at hand to `collector`."""

    recomputation: Recomputation
    traced = False  # whether the tensors have no contents: a graph is being made

    def __init__(self, collector: Collector, tracker: Tracker) -> None:
        self.collector, self.tracker = collector, tracker
        self.batch: Batch | None = None
        self.mean_loss = True
        self.weight = 1.0  # of this pass, where a batch's gradient is a combination of two
        self._anchor = torch.zeros((), requires_grad=True, device=collector.total.device)
        self._device = collector.total.device.type
        self._forward: Forward | None = None
        self._kept: WeakSet[_Kept] = WeakSet()  # inputs of the batch at hand
        self.numbered: dict[int, Forward] = {}  # its forward passes that ran compiled
        self.reached: set[str] = set()  # parameters that a gradient has come to, of any row

    @property
    def forward(self) -> Forward:
        """The running forward pass."""
        assert self._forward is not None
        return self._forward

    @property
    def watches(self) -> bool:
        """Whether a forward pass is running that gradients are taken of."""
        return self._forward is not None

    @property
    def rows(self) -> int:
        """The number of rows of the running forward pass."""
        return self.forward.rows

    @property
    def dtype(self) -> torch.dtype:
        """The precision that sums are kept in."""
        return self.collector.total.dtype

    def forget(self) -> None:
        """Nothing of an earlier batch is kept."""
        self._kept.clear()
        self.numbered.clear()

    def reopen(self) -> None:
        """The batch at hand may have one more backward pass: its gradients were taken care of."""
        assert self.batch is not None
        self.batch.backward, self.batch.done = None, False
        self.batch.record = ForwardRecord()

    # -- in the forward pass, for rules -----------------------------------------------------

    def tap(
        self, out: Tensor, refs: Sequence[Ref | None], uses: Callable[[Tensor], Uses]
    ) -> Tensor:
        """Have `uses(g)` called with the gradient of `out`, an operation that used `refs`."""
        site = self._site([ref.slot for ref in refs if ref], uses)
        if out.requires_grad:
            out.register_hook(site)
            return out
        return _Tap.apply(out, self._anchor, site)  # type: ignore[no-any-return, no-untyped-call]

    def lift(self, ref: Ref, size: Sequence[int], rows: Rows) -> Tensor:
        """`ref` repeated to `size`, which has the batch's `rows`, its gradients captured by row."""
        shape, count = ref.value.shape, self.rows

        def uses(g: Tensor) -> Uses:
            by_row = rows.summed(g.to(self.dtype))
            return [ref.use(PerExample(by_row.reshape(count, *shape)))]

        pad = [1] * (len(size) - len(shape))
        value = ref.value.reshape(*pad, *shape)
        lifted = self.repeated(value, size, ref, uses)
        self.tracker.give(lifted, rows)
        return lifted

    def repeated(
        self, value: Tensor, size: Sequence[int], ref: Ref, uses: Callable[[Tensor], Uses]
    ) -> Tensor:
        """`value`, which is `ref`'s, with as many entries as `size` says; `uses(g)` as in `tap`."""
        site = self._site([ref.slot], uses)
        return _Lift.apply(value, size, self._anchor, site)  # type: ignore[no-any-return, no-untyped-call]

    def saved(self, value: Tensor) -> Callable[[], Tensor]:
        """Keep an operation's input for the backward pass, refusing if it is changed in between."""
        if self.recomputation.depth:
            # The stand-in is kept, not its node alone: some versions of torch free what a node has
            # saved as soon as no tensor refers to the node.
            held = Held.apply(self._anchor, value.detach())  # type: ignore[no-untyped-call]
            return lambda: held.grad_fn.saved_tensors[0]
        kept, version = value.detach(), value._version

        def get() -> Tensor:
            if kept._version != version:
                raise PrivacyError(
                    "a layer's input was changed by an in-place operation before the backward "
                    "pass, so its gradient cannot be computed: use the out-of-place form."
                )
            return kept

        return get

    def by_row(self, value: Tensor, rows: Rows) -> Tensor:
        """`value` with its rows first, in the clipped sum's precision."""
        value = rows.first(value)
        return value if value.dtype == self.dtype else value.to(self.dtype)

    def as_autocast(self, value: Tensor) -> Tensor:
        """`value` as bf16 autocast hands it to a product on a GPU.

        This copy is the one to keep: the weight's gradient is then made of what the product has
        seen, as autograd makes it, and half the memory holds it.
        """
        if value.dtype != torch.float32 or not value.is_cuda:
            return value
        if not torch.is_autocast_enabled("cuda") or not fused.available():
            return value
        half = torch.get_autocast_dtype("cuda")
        return value.to(half) if half == torch.bfloat16 else value

    def as_factor(self, value: Tensor) -> Tensor:
        """`value` as weights' gradients multiply it: bf16 stays what it is on a GPU."""
        narrow = fused.multiplies(value, tf32=False) and self.dtype == torch.float32
        return value if narrow or value.dtype == self.dtype else value.to(self.dtype)

    def squares(self, g: Tensor) -> Tensor | None:
        """The squared norms of an output gradient without positions, for all who need them."""
        return row_squares(g, factor=True) if g.ndim == 2 else None

    # -- in the backward pass ---------------------------------------------------------------

    def _site(self, slots: list[Slot], uses: Callable[[Tensor], Uses]) -> Callable[[Tensor], None]:
        forward = self.forward
        if self.tracker.again:
            return do_nothing  # the first run of the block has its own
        forward.record.note(slots)
        kept = _Kept(uses)
        self._kept.add(kept)

        def arrive(g: Tensor) -> None:
            def scaled(weight: float) -> Uses:
                assert kept.uses is not None
                return kept.uses(g.detach() if weight == 1 else g.detach() * weight)

            self.arrive(forward, slots, scaled)

        return arrive

    def arrive(
        self, forward: Forward | None, slots: Sequence[Slot], uses: Callable[[float], Uses]
    ) -> None:
        """An output gradient has come; `uses(weight)` are the uses of so many times it."""
        with exact(self._device):
            self._arrive(forward, uses)
        self.reached.update(slot.name for slot in slots)

    def _arrive(self, forward: Forward | None, uses: Callable[[float], Uses]) -> None:
        batch = forward.batch if forward else None
        if forward is None or batch is None or batch is not self.batch:
            raise _not_of_the_batch(forward, self.batch)
        task = torch._C._current_graph_task_id()
        if batch.done or (batch.backward is not None and batch.backward != task):
            raise PrivacyError(
                "a second backward on the same batch: its examples would count twice, up to 2C. "
                "Add the losses up and call backward once for every batch. Where gradients of "
                "inputs alone are wanted (adversarial examples), freeze the model while they are "
                "taken: model.requires_grad_(False). (After a backward that failed, "
                "engine.abandon_lot() gives the lot up.)"
            )
        if batch.backward is None:
            batch.backward = task
            if batch.weights is not None:
                batch.weights = batch.weights.to(self.collector.total.device)
            self.collector.begin(batch.scale(self.mean_loss))
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)
        if not batch.empty:
            fold = Fold.of(batch)
            whole = [(slot, fold(use)) for slot, use in uses(self.weight)]
            self.collector.arrive(forward.record, whole)

    def _end_backward(self) -> None:
        assert self.batch is not None
        with exact(self._device):
            self.collector.finish()
        self.batch.done = True
        if self.collector.once:
            for kept in self._kept:
                kept.uses = None
            self._kept.clear()
