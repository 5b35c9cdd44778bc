"""The backward pass: output gradients arrive where operations were tapped, and become uses.

`tap` and `lift` are called by rules in the forward pass. In the backward pass autograd hands them
an output gradient, from which the rule makes the uses of its parameters; the collector clips them.
Every batch has one backward pass, that of the batch which the loader handed out last.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from vestige.gradients.uses import PerExample
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


class BackwardPass:
    """Takes output gradients of the batch at hand to `collector`."""

    recomputation: Recomputation

    def __init__(self, collector: Collector, tracker: Tracker) -> None:
        self.collector, self.tracker = collector, tracker
        self.batch: Batch | None = None
        self.mean_loss = True
        self.weight = 1.0  # of this pass, where a batch's gradient is a combination of two
        self._anchor = torch.zeros((), requires_grad=True, device=collector.total.device)
        self._device = collector.total.device.type
        self._forward: Forward | None = None
        self._kept: WeakSet[_Kept] = WeakSet()  # inputs of the batch at hand
        self.reached: set[str] = set()  # parameters that a gradient has come to, of any row

    @property
    def forward(self) -> Forward:
        """The running forward pass."""
        assert self._forward is not None
        return self._forward

    @property
    def rows(self) -> int:
        """The number of rows of the running forward pass."""
        return self.forward.rows

    @property
    def dtype(self) -> torch.dtype:
        """The precision that sums are kept in."""
        return self.collector.total.dtype

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
        lifted: Tensor = _Lift.apply(value, size, self._anchor, self._site([ref.slot], uses))  # type: ignore[no-untyped-call]
        self.tracker.give(lifted, rows)
        return lifted

    def saved(self, value: Tensor) -> Callable[[], Tensor]:
        """Keep an operation's input for the backward pass, refusing if it is changed in between."""
        if self.recomputation.depth:
            node = Held.apply(self._anchor, value.detach()).grad_fn  # type: ignore[no-untyped-call]
            return lambda: node.saved_tensors[0]
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

    # -- in the backward pass ---------------------------------------------------------------

    def _site(self, slots: list[Slot], uses: Callable[[Tensor], Uses]) -> Callable[[Tensor], None]:
        forward = self.forward
        if self.tracker.again:
            return do_nothing  # the first run of the block has its own
        forward.record.note(slots)
        kept = _Kept(uses)
        self._kept.add(kept)

        def arrive(g: Tensor) -> None:
            with exact(self._device):
                self._arrive(forward, kept, g.detach())
            self.reached.update(slot.name for slot in slots)

        return arrive

    def _arrive(self, forward: Forward, kept: _Kept, g: Tensor) -> None:
        batch = forward.batch
        if batch is None or batch is not self.batch:
            raise PrivacyError(
                "backward on a batch that is not the one the private loader handed out last: "
                "iterate over the loader that make_private returned, pass each of its batches "
                "whole through the model, and evaluate other data under torch.no_grad(). Where "
                "another model learns from this one (a GAN's generator), freeze this one for that "
                "step: model.requires_grad_(False), and True again before the next batch."
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
            assert kept.uses is not None
            scaled = g if self.weight == 1 else g * self.weight
            self.collector.arrive(forward.record, kept.uses(scaled))

    def _end_backward(self) -> None:
        assert self.batch is not None
        with exact(self._device):
            self.collector.finish()
        self.batch.done = True
        if self.collector.once:
            for kept in self._kept:
                kept.uses = None
            self._kept.clear()
