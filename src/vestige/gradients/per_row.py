"""Per-example gradients at per-example weights: every row of a batch runs with its own copy.

    g_i(theta + move_i),   move_i = radius * g_i(theta) / |g_i(theta)|   (per-example SAM)

While the user's closure runs, the root module's forward is replaced by `torch.func.vmap` over the
rows with parameters (n, *shape); every row is a batch of one, so one backward pass gives each row
the gradient at its own weights. Products with linear and convolution weights are written by hand:
they put the gradients straight into the flat (n, P) buffer. Everything else is left to vmap.

Guarantee: where the loss is a sum or mean over rows, a row's gradient is a function of that row and
of weights and constants alone, so clipping it bounds what an example can change: per-example SAM is
one sampled Gaussian event, like DP-SGD.
Tensors without the batch's rows are refused, because they could carry one row to the others;
numbers that the model is given are taken for constants.

Paper: Foret et al. 2021, Sharpness-Aware Minimization (arXiv 2010.01412), here for each example.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from vestige.errors import PrivacyError, UnsupportedModel, VestigeError
from vestige.gradients.groups import Groups
from vestige.gradients.hooks import Guard, changed_by_forward
from vestige.gradients.row_products import RowProducts
from vestige.gradients.rules.convolution import NUMBERS_AT_ONCE
from vestige.gradients.uses import row_squares

Closure = Callable[[], Any]

_PLAIN = (bool, int, float, complex, str, torch.dtype, torch.device, type(None))


def own_ascent(gradients: Tensor, radius: float) -> Tensor:
    """radius * g_i / |g_i| for every row of `gradients` (n, P), in place.

    Norms are float64. A gradient that is zero or not finite gives no move.
    """
    # A few rows at a time: the squares of all of them would be another (n, P).
    step = max(1, NUMBERS_AT_ONCE.get(gradients.device.type, 2**21) // gradients.shape[1])
    norms = torch.cat([row_squares(some) for some in gradients.split(step)]).sqrt_()
    factors = (radius / norms).to(gradients.dtype)
    bad = ~(norms.isfinite() & factors.isfinite())
    gradients.mul_(factors.masked_fill_(bad, 0).unsqueeze(1))
    if bool(bad.any()):
        gradients[bad] = 0  # zero times infinity is not zero
    return gradients


class Expanded:
    """A model whose rows each have weights of their own while a closure runs.

    Two (n, P) buffers are kept from step to step: fresh memory takes longer than the arithmetic on
    it. They hold raw gradients, which are private.
    """

    def __init__(
        self, module: nn.Module, groups: Groups, axis: int = 0, mean_loss: bool = True
    ) -> None:
        self.module, self.groups, self.axis = module, groups, axis
        self.mean_loss = mean_loss  # how a loss that the model itself returns joins its rows
        empty = groups.buffer()[:0].clone()
        self._buffers = [empty, empty]

    def gradients(
        self, closure: Closure, rows: int, move: Tensor | None = None
    ) -> tuple[Tensor, Any]:
        """The gradient of the closure's loss in every row's own weights, and what it returned.

        (rows, P), flat like the groups' buffer; where the loss is a mean over the rows, 1/rows of
        the gradients of the rows' losses. With `move` (rows, P), row i is at theta + move[i], and
        `move` is used up: it becomes the moved weights. A result lasts until the next call of the
        same kind, with or without `move`.
        """
        self.groups.check_unchanged(self.module)
        flat = self._room(rows, move)
        turn = _Turn(self, rows, flat, self._weights(rows, move))
        try:
            with _untouched(self.module, self.groups), turn.forward_replaced(), torch.enable_grad():
                result = closure()
        except RuntimeError as error:
            if isinstance(error, VestigeError) or "vmap" not in str(error):
                raise
            raise _unsupported(self.module, error) from error  # checkpointing, in the backward pass
        turn.finish()
        return flat, result

    def _room(self, rows: int, move: Tensor | None) -> Tensor:
        """A buffer for the gradients that does not hold `move`."""
        size = rows * self.groups.size
        taken = None if move is None else move.untyped_storage().data_ptr()
        which = 0 if self._buffers[1].untyped_storage().data_ptr() == taken or not taken else 1
        if self._buffers[which].numel() < size:
            self._buffers[which] = self._buffers[which].new_empty(size)
        return self._buffers[which][:size].view(rows, -1)

    @torch.no_grad()
    def _weights(self, rows: int, move: Tensor | None) -> dict[str, Tensor]:
        """(rows, *shape) for every trainable parameter; views of the one copy if nothing moves."""
        weights = {}
        for slot in self.groups.slots:
            home = slot.parameter.detach()
            weights[slot.name] = home.expand(rows, *home.shape)
            if move is not None:
                part = move[:, slot.start : slot.stop].view(rows, *home.shape)
                weights[slot.name] = part.add_(home).to(home.dtype)
        return weights


class _Turn(nn.Module):
    """One evaluation of the closure. A module, so that `functional_call` can swap the weights of
    the root without calling the root's hooks, which have run when its forward is called."""

    def __init__(
        self, owner: Expanded, rows: int, flat: Tensor, weights: dict[str, Tensor]
    ) -> None:
        super().__init__()
        self.root, self.rows, self.weights = owner.module, rows, weights
        self.axis, self.mean_loss = owner.axis, owner.mean_loss
        self.sinks = {
            slot.name: flat[:, slot.start : slot.stop].view(rows, *slot.parameter.shape)
            for slot in owner.groups.slots
        }
        self.missing = set(self.sinks)
        self.called = self.running = False
        self.backward: int | None = None

    @contextmanager
    def forward_replaced(self) -> Iterator[None]:
        """The root's forward gives every row its own weights."""
        instance, original = self.root.__dict__, self.root.forward
        before = {"forward": original} if "forward" in instance else {}

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self.running or not torch.is_grad_enabled():
                return original(*args, **kwargs)  # the root within itself, or an evaluation
            return self._by_row(original, args, kwargs)

        try:
            instance["forward"] = forward
            yield
        finally:
            instance.pop("forward", None)
            instance.update(before)

    def forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The root's own forward, called with swapped weights."""
        return original(*args, **kwargs)

    def finish(self) -> None:
        """The closure is over: did it do what it must?"""
        if self.backward is None:
            missing = "call backward on its loss" if self.called else "call the model"
            raise PrivacyError(
                f"the closure did not {missing}: it must run the model once on the whole batch, "
                "not under torch.no_grad(), call backward once on the loss, and return the loss."
            )
        for name in self.missing:
            self.sinks[name].zero_()  # a parameter without a part in the loss

    def arrive(self, name: str, g: Tensor) -> None:
        """The rows' gradients of one parameter, unless a product has put them in place already."""
        task = torch._C._current_graph_task_id()
        if self.backward not in (None, task):
            raise PrivacyError(
                "the closure called backward twice: add the losses up and call backward once."
            )
        self.backward = task
        self.missing.discard(name)
        if g.data_ptr() != self.sinks[name].data_ptr():
            self.sinks[name].copy_(g)

    def _by_row(self, original: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if self.called:
            raise PrivacyError(
                "the closure called the model twice: call it once on the whole batch, and evaluate "
                "under torch.no_grad()."
            )
        self.called = True
        leaves, spec = pytree.tree_flatten((args, kwargs))
        axes = [self._row_axis(leaf) for leaf in leaves]
        split = {i: axis for i, axis in enumerate(axes) if axis is not None}
        if not split:
            raise PrivacyError(
                f"the closure called the model without a tensor of the batch's {self.rows} rows: "
                "pass the whole batch of the private loader."
            )
        anchor = torch.zeros((), requires_grad=True)
        copies = {
            name: _Copies.apply(anchor, value, name, self)  # type: ignore[no-untyped-call]
            for name, value in self.weights.items()
        }
        results: list[Any] = []

        def one(weights: dict[str, Tensor], *columns: Tensor) -> list[Tensor]:
            row = list(leaves)
            for (i, axis), column in zip(split.items(), columns, strict=True):
                row[i] = column.unsqueeze(axis)  # the model sees a batch of one
            row_args, row_kwargs = pytree.tree_unflatten(row, spec)
            named = {f"root.{name}": weight for name, weight in weights.items()}
            with RowProducts({id(weight): self.sinks[name] for name, weight in weights.items()}):
                out = functional_call(self, named, (original, *row_args), row_kwargs)
            results[:] = pytree.tree_flatten(out)
            tensors = [leaf for leaf in results[0] if isinstance(leaf, Tensor)]
            if not tensors:
                raise ValueError(f"it returns a {type(out).__name__} without tensors that are seen")
            return tensors

        self.running = True
        try:
            run = vmap(one, (0, *split.values()), randomness="different")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                outputs = iter(run(copies, *(leaves[i] for i in split)))
            joined = [
                self._join(next(outputs)) if isinstance(leaf, Tensor) else _plain(leaf)
                for leaf in results[0]
            ]
        except VestigeError:
            raise
        except (RuntimeError, ValueError) as error:
            raise _unsupported(self.root, error) from error
        finally:
            self.running = False
        return pytree.tree_unflatten(joined, results[1])

    def _row_axis(self, leaf: Any) -> int | None:
        """Where an argument has the rows; None for numbers, which all rows share."""
        if not isinstance(leaf, Tensor):
            if isinstance(leaf, _PLAIN):
                return None
            raise UnsupportedModel(
                f"the model is given a {type(leaf).__name__}, whose rows cannot be told apart: use "
                "tensors, or tuples, lists and dicts of them."
            )
        if not leaf.ndim:
            return None
        axis = min(self.axis, leaf.ndim - 1)
        if leaf.shape[axis] != self.rows:
            raise PrivacyError(
                f"the model was given a tensor of shape {tuple(leaf.shape)}, whose axis {axis} has "
                f"not the {self.rows} rows of the batch. A row's gradient must depend on that row "
                "alone: pass the whole batch of the private loader, and make what all rows share a "
                "buffer of the model."
            )
        return axis

    def _join(self, rows: Tensor) -> Tensor:
        """An output (n, ...) of batches of one, as the model gives it for the whole batch."""
        shape = tuple(rows.shape[1:])
        if not shape and rows.is_floating_point():
            return rows.mean() if self.mean_loss else rows.sum()
        # Where an output has two axes the first has the rows if it can, as in the capture.
        order = (1, 0) if len(shape) > 2 else (0, 1)
        for axis in order if self.axis else (0,):
            if len(shape) > axis and shape[axis] == 1:
                return rows.squeeze(axis + 1).movedim(0, axis)
        raise ValueError(f"an output of shape {shape} has no batch axis")


@contextmanager
def _untouched(module: nn.Module, groups: Groups) -> Iterator[None]:
    """Refuses a gradient that reaches the real parameters and a change of the model's state."""
    guards = [slot.parameter.register_hook(Guard(slot.name)) for slot in groups.slots]
    stores: list[Any] = [s for m in module.modules() for s in (m._buffers, m._parameters)]
    before = [(dict(store), _versions(store)) for store in stores]
    changed: list[str] = []
    try:
        yield
    finally:
        for guard in guards:
            guard.remove()
        for store, (tensors, versions) in zip(stores, before, strict=True):
            changed += [key for key, _, _ in _versions(store) ^ versions]
            if changed:
                store.clear()  # a tensor that was made under vmap is of no use outside
                store.update(tensors)
    if changed:
        raise changed_by_forward(changed[0])


def _versions(store: Mapping[str, Tensor | None]) -> set[tuple[str, int, int]]:
    return {(key, id(t), t._version) for key, t in store.items() if t is not None}


def _unsupported(module: nn.Module, error: Exception) -> UnsupportedModel:
    what = (str(error) or repr(error)).splitlines()[0]
    return UnsupportedModel(
        f"{type(module).__name__} could not be run with weights of its own for every row "
        f"({what}): use dp-sam or dp-sat, whose rows share their weights."
    )


def _plain(value: Any) -> Any:
    """Numbers and options, and None for anything that may hold tensors of one row (a cache)."""
    return value if isinstance(value, _PLAIN) else None


class _Copies(torch.autograd.Function):
    """The rows' weights, whose gradient goes to `turn` and nowhere else."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, value: Tensor, name: str, turn: _Turn) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.name, ctx.turn = name, turn
        return value.view_as(value)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor | None) -> tuple[None, None, None, None]:
        if g is not None:
            ctx.turn.arrive(ctx.name, g)
        return None, None, None, None
