"""One trial of a model on synthetic rows: what it returns and which gradients each row has."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from vestige.errors import PrivacyError, VestigeError
from vestige.gradients.capture import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.groups import Groups
from vestige.gradients.rows import Label, Meeting, Rows, Summed
from vestige.gradients.synthetic import NoChance
from vestige.sampling.loader import Batch


class RowNorms(Collector):
    """Adds gradients up unclipped, and keeps each row's squared norm."""

    in_pieces = once = False

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, Clip((1e140,) * groups.count))
        self.squares: Tensor | None = None

    def clear(self) -> None:
        super().clear()
        self.squares = None

    def _look(self, square_norms: Tensor, group: int) -> None:
        held = 0 if self.squares is None else self.squares
        self.squares = held + square_norms.detach().double()


@dataclass(frozen=True)
class Output:
    """One tensor that the model returned for all rows: the rows are on `axis`, as `owners` says."""

    value: Tensor
    axis: int
    owners: Tensor
    cotangent: Tensor

    def places(self, row: int) -> Tensor:
        """Where on the axis one row's entries are."""
        return (self.owners == row).nonzero()[:, 0]

    def of(self, row: int) -> Tensor:
        """The entries of one row."""
        return self.value.index_select(self.axis, self.places(row))

    def cotangent_of(self, row: int) -> Tensor:
        """The cotangent of one row alone."""
        return self.cotangent.index_select(self.axis, self.places(row))

    def masked(self, row: int) -> Tensor:
        """The cotangent of all rows, with everybody else's set to zero."""
        shape = [1] * self.value.ndim
        shape[self.axis] = -1
        return torch.where((self.owners == row).view(shape), self.cotangent, 0)


@dataclass
class Trial:
    """Synthetic rows, and what the model makes of all of them."""

    capture: Capture
    inputs: Any
    batched: list[bool]  # which of the inputs' leaves have rows
    rows: int

    def begin(self) -> str | None:
        """Run the model on all rows; why that says nothing, if so."""
        try:
            self.leaves = self.captured(self.inputs, self.rows)  # all that the model returned
        except VestigeError:
            raise
        except Exception as error:
            return f"the model does not run on synthetic rows: {error!r}"
        self.outputs = self.outputs_in(self.leaves)  # those that have rows, by their place
        self.loss: int | None = None  # the place of a loss, where no output has rows
        if not self.outputs:
            labels = {at: self._label(leaf) for at, leaf in enumerate(self.leaves)}
            self.loss = next((at for at, x in labels.items() if isinstance(x, Summed)), None)
            if self.loss is None:
                for label in labels.values():
                    if isinstance(label, Rows):
                        label = Meeting("a change of the rows' order that is not undone")
                    if isinstance(label, Meeting):
                        raise label.refusal()
                return "the model returns nothing with batch rows"
        if any(bool(o.value.isnan().any()) for o in self.outputs.values()):
            return "the model's outputs for synthetic rows are not numbers"
        return None

    def rounding(self, tolerance: float) -> float:
        """What rounding may do: more where FSDP has weights in a narrow type, which stay in it."""
        return max(tolerance, 16 * self.capture.shards.eps)

    @property
    def places(self) -> list[int]:
        """The places of what is compared."""
        return list(self.outputs) if self.loss is None else [self.loss]

    def _label(self, leaf: Any) -> Label | None:
        """The label of what may enter a loss."""
        differentiable = (
            isinstance(leaf, Tensor) and leaf.requires_grad and leaf.is_floating_point()
        )
        return self.capture.tracker.label(leaf) if differentiable else None

    def outputs_in(self, leaves: list[Any]) -> dict[int, Output]:
        """What the model returned with rows in the batch's order."""
        outputs = {}
        for at, leaf in enumerate(leaves):
            label = self._label(leaf)
            if isinstance(label, Rows) and label.order is None:
                axis, inner = label.place(leaf.shape) or (0, 1)
                owners = label.owners(leaf.shape, axis, inner, leaf.device)
                outputs[at] = Output(leaf, axis, owners, torch.randn(leaf.shape).to(leaf))
        return outputs

    def captured(self, inputs: Any, rows: int, unit_rows: int = 1) -> list[Any]:
        """What the model returns, captured: ready for a backward pass."""
        self.capture.collector.clear()
        self.capture.start(Batch(rows, unit_rows=unit_rows))
        with torch.enable_grad():
            return self._run(inputs)

    def plainly(self, change: Callable[[Tensor], Tensor], gradients: bool = True) -> list[Any]:
        """What the model returns for changed inputs, as if nobody watched."""
        self.capture.tracker.restart()
        with self.capture.plainly(), torch.set_grad_enabled(gradients):
            return self._run(self.changed(change))

    def _run(self, inputs: Any) -> list[Any]:
        # A model may change its inputs in place.
        args, kwargs = pytree.tree_map(lambda t: t.clone() if isinstance(t, Tensor) else t, inputs)
        torch.manual_seed(0)
        with NoChance(self.capture):
            return pytree.tree_leaves(self.capture.module(*args, **kwargs))

    def changed(self, change: Callable[[Tensor], Tensor]) -> Any:
        """The inputs with `change` made to those that have rows."""
        leaves, spec = pytree.tree_flatten(self.inputs)
        changed = [change(v) if b else v for v, b in zip(leaves, self.batched, strict=True)]
        return pytree.tree_unflatten(changed, spec)

    def backward(
        self, targets: list[Tensor], cotangents: list[Tensor], rows: int, again: bool = True
    ) -> tuple[Tensor, Tensor]:
        """The sum of the rows' gradients and their squared norms; `again` says that others follow
        from the same pass."""
        collector = self.capture.collector
        assert isinstance(collector, RowNorms)
        collector.clear()
        self.capture.reopen()
        torch.autograd.backward(targets, cotangents, retain_graph=again)
        squares = collector.squares
        if squares is None:
            squares = torch.zeros(rows, device=collector.total.device, dtype=torch.float64)
        return collector.total.double().clone(), squares

    def alone(self, row: int) -> tuple[list[Tensor], Tensor]:
        """The outputs and the flat gradient of one row by itself, by plain autograd."""
        axis, groups, places = self.capture.axis, self.capture.groups, self.places
        leaves = self.plainly(lambda t: t.narrow(axis, row, 1))
        if len(leaves) <= max(places):
            raise mixed("the model gives other outputs for one row than for several")
        outputs = [leaves[at] for at in places]
        cotangents = [
            torch.ones_like(out) if self.loss is not None else self.outputs[at].cotangent_of(row)
            for at, out in zip(places, outputs, strict=True)
        ]
        pairs = list(zip(outputs, cotangents, strict=True))
        if any(out.shape != c.shape for out, c in pairs):
            raise mixed(
                "the model gives outputs of another shape for one row than for several, as "
                "squeeze() does, which takes the axis of a single row away: name the axis, as in "
                "squeeze(-1)"
            )
        differentiable = [(out, c) for out, c in pairs if out.requires_grad]
        with self.capture.plainly():
            gradients = torch.autograd.grad(
                [out for out, _ in differentiable],
                [self.capture.shards.whole(slot) for slot in groups.slots],
                [c for _, c in differentiable],
                allow_unused=True,
            )
        flat = groups.buffer().double()
        for slot, g in zip(groups.slots, gradients, strict=True):
            if g is not None:
                slot.view(flat).copy_(g.to_dense() if g.is_sparse else g)
        return [o.detach() for o in outputs], flat


def mixed(what: str) -> PrivacyError:
    """The error for examples that were shown to have a part in each other."""
    return PrivacyError(
        f"{what}. The clip bound would not hold. Look for an operation across the batch (batch "
        "statistics, attention over the batch, a contrastive term), a batch axis that is not the "
        "first (batch_first=False if it is the second), or a position in the lot that matters."
    )
