"""The generic rule: a module that does something uncovered runs one row at a time under vmap.

While the root module runs, the forward method of every submodule with trainable parameters is
shadowed on the instance (and put back after). If one of its operations is uncovered, the innermost
such module with batched inputs is run again by `torch.func.vmap`, each row with its own copy of the
module's parameters, so that autograd returns per-example gradients. They are held for that module
only, rows x its parameters; the root itself is never run so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from vestige.errors import UnsupportedModel, VestigeError
from vestige.gradients.caches import handed
from vestige.gradients.hooks import FACTS
from vestige.gradients.refs import Ref, Uncovered, tensors_in
from vestige.gradients.rows import Meeting, Rows
from vestige.gradients.tracker import Tracker

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture

# Every way these use their parameters is covered, so there is nothing to shadow.
_COVERED = (
    nn.Linear,
    nn.Conv1d,
    nn.Conv2d,
    nn.Conv3d,
    nn.Embedding,
    nn.LayerNorm,
    nn.GroupNorm,
    nn.RMSNorm,
)


class Fallback:
    """Remembers which modules of a model need the generic rule."""

    def __init__(self, module: nn.Module) -> None:
        self.root = module
        self.needed: set[nn.Module] = set()
        self._shadowed: list[nn.Module] = []  # while the root runs

    @cached_property
    def _candidates(self) -> list[tuple[str, nn.Module]]:
        """Modules that train something and are not covered by their type."""
        return [
            (name, module)
            for name, module in self.root.named_modules()
            if module is not self.root
            and type(module) not in _COVERED
            and any(p.requires_grad for p in module.parameters())
        ]

    @contextmanager
    def __call__(self, capture: Capture) -> Iterator[None]:
        """Shadow the forward methods while the root runs."""
        # A forward that the user put on the instance is left alone.
        shadowed = [(n, m) for n, m in self._candidates if "forward" not in m.__dict__]
        for name, module in shadowed:
            module.__dict__["forward"] = self._shadow(capture, name, module)
        self._shadowed = [module for _, module in shadowed]
        try:
            yield
        finally:
            for module in self._shadowed:
                module.__dict__.pop("forward", None)
            self._shadowed = []

    @contextmanager
    def away(self) -> Iterator[None]:
        """The forward methods are the modules' own for a while."""
        kept = [(m, f) for m in self._shadowed if (f := m.__dict__.pop("forward", None))]
        try:
            yield
        finally:
            for module, forward in kept:
                module.__dict__["forward"] = forward

    def _shadow(self, capture: Capture, name: str, module: nn.Module) -> Callable[..., Any]:
        original = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if capture.paused:
                return original(module, *args, **kwargs)
            if module not in self.needed:
                capture.inside.append(f"{type(module).__name__} {name!r}")
                try:
                    return original(module, *args, **kwargs)
                except Uncovered:
                    # Without batched inputs the enclosing module has to run row by row.
                    leaves = pytree.tree_leaves((args, kwargs))
                    if not any(_has_rows(capture, leaf) for leaf in leaves):
                        raise
                finally:
                    capture.inside.pop()
                self.needed.add(module)
                if capture.recomputation.depth:  # torch has counted what the try has saved
                    raise UnsupportedModel(
                        f"{type(module).__name__} {name!r}, inside a checkpoint, has no gradient "
                        "rule and is met for the first time: leave self_check on, which meets it "
                        "outside, or checkpoint a smaller block."
                    )
            return self._row_by_row(capture, name, module, args, kwargs)

        return forward

    def _row_by_row(
        self, capture: Capture, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        if (cache := handed(kwargs)) is not None:
            raise UnsupportedModel(
                f"{type(module).__name__} {name!r} has no per-example gradient rule and is handed "
                f"a cache of other positions ({cache}), which cannot be kept one row at a time: "
                "call the model with use_cache=False."
            )
        capture.paused = True  # what follows is for vmap to see
        try:
            return self._with_own_parameters(capture, module, args, kwargs)
        except VestigeError:
            raise
        except (RuntimeError, ValueError) as error:
            in_eval = " Some layers keep tensors between passes in eval(): call model.train()."
            raise UnsupportedModel(
                f"{type(module).__name__} {name!r} has no per-example gradient rule and "
                f"could not be run one row at a time ({str(error).splitlines()[0]}). Use a covered "
                f"layer in its place, or freeze its parameters.{'' if module.training else in_eval}"
            ) from error
        finally:
            capture.paused = False

    def _with_own_parameters(
        self, capture: Capture, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        rows = capture.rows
        leaves, spec = pytree.tree_flatten((args, kwargs))
        # Other modules, and parameters of theirs, may be arguments: a table of distances that all
        # layers share, the two factors of an adapter.
        called = _Called([module, *(leaf for leaf in leaves if isinstance(leaf, nn.Module))])
        refs = {
            key: ref for key, p in called.named_parameters() if (ref := capture.find(p)) is not None
        }
        given = {i: ref for i, leaf in enumerate(leaves) if (ref := capture.find(leaf)) is not None}
        split = {
            i: seat
            for i, leaf in enumerate(leaves)
            if i not in given and (seat := _seat(capture, leaf, refs))
        }

        def lift(ref: Ref) -> Tensor:
            shape = (rows, *ref.value.shape)
            return capture.lift(ref, shape, capture.tracker.on_axis(shape, 0))

        def one(
            parameters: dict[str, Tensor], arguments: dict[int, Tensor], *columns: Tensor
        ) -> Any:
            row = list(leaves)
            for i, argument in arguments.items():
                row[i] = argument
            for i, column in zip(split, columns, strict=True):
                row[i] = split[i].column(column)
            row_args, row_kwargs = pytree.tree_unflatten(row, spec)
            with _Alone(capture.tracker):
                returned = functional_call(called, parameters, row_args, row_kwargs)
            made, shape = pytree.tree_flatten(returned)
            rest[:] = [Tensor if isinstance(value, Tensor) else value for value in made]
            specs[:] = [shape]
            return [value for value in made if isinstance(value, Tensor)]

        rest: list[Any] = []  # what the module returns beside tensors, the same for every row
        specs: list[Any] = []
        # The fused kernels have no rule for a mask by row that needs a gradient.
        with warnings.catch_warnings(), sdpa_kernel(SDPBackend.MATH):
            warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
            run = vmap(one, randomness="different")
            out = run(
                {key: lift(ref) for key, ref in refs.items()},
                {i: lift(ref) for i, ref in given.items()},
                *(split[i].first(leaves[i]) for i in split),
            )
        seats = list(split.values())
        tensors = iter([_joined(capture, t, seats) for t in out])
        made = [next(tensors) if value is Tensor else value for value in rest]
        return pytree.tree_unflatten(made, specs[0])


class _Alone(TorchFunctionMode):
    """One row runs: it meets no tensor of the whole batch, which an object, a closure or an
    attribute may hold beside the arguments."""

    def __init__(self, tracker: Tracker) -> None:
        super().__init__()
        self._tracker = tracker

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func not in FACTS and any(map(self._tracker.saw, tensors_in((args, kwargs)))):
            raise Meeting("a layer that is run row by row and reaches the whole batch").refusal()
        return func(*args, **(kwargs or {}))


class _Called(nn.ModuleList):
    """A module that is called, and modules that it is given, whose parameters are swapped too."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self[0](*args, **kwargs)


@dataclass(frozen=True)
class _Seat:
    """Where an argument has the rows: `outer` and `inner` entries of the axis share each row."""

    rows: Rows
    axis: int
    outer: int
    inner: int

    def first(self, value: Tensor) -> Tensor:
        """The argument with its rows first."""
        return value.unsqueeze(0) if self.rows.batch == 1 else self.rows.first(value)

    def column(self, value: Tensor) -> Tensor:
        """One row of the argument as a batch of one (or of the entries that it owns)."""
        if self.rows.batch == 1:
            return value
        if self.outer == self.inner == 1:
            return value.unsqueeze(self.axis)
        both = self.outer > 1 and self.inner > 1
        return value.flatten(self.axis, self.axis + 1) if both else value

    def put_back(self, value: Tensor) -> Tensor | None:
        """Outputs (n, ...) of all rows as the module gives them at once; None if they differ."""
        if self.rows.batch == 1:
            return value.squeeze(0)
        if value.ndim <= self.axis + 1 or value.shape[self.axis + 1] != self.outer * self.inner:
            return None
        if self.rows.order is not None:
            value = value.index_select(0, self.rows.order)
        value = value.unflatten(self.axis + 1, (self.outer, self.inner))
        return value.movedim(0, self.axis + 1).flatten(self.axis, self.axis + 2)


def _has_rows(capture: Capture, value: Any) -> bool:
    return isinstance(value, Tensor) and isinstance(capture.tracker.label(value), Rows)


def _seat(capture: Capture, value: Any, refs: Mapping[str, Ref]) -> _Seat | None:
    """Where an argument of a module has rows, None for what all rows share."""
    if not isinstance(value, Tensor):
        return None
    rows = capture.rows_in(value, list(refs.values()), "a module", channels=0)
    if rows is None:
        return None
    if capture.rows == 1:
        return _Seat(rows, 0, 1, 1)  # all of it is the one row's
    place = rows.place(value.shape)
    assert place is not None
    axis, inner = place
    return _Seat(rows, axis, value.shape[axis] // (inner * rows.count), inner)


def _joined(capture: Capture, value: Any, seats: list[_Seat]) -> Any:
    if not isinstance(value, Tensor):
        return value
    for seat in seats:
        whole = seat.put_back(value)
        if whole is not None:
            rows = seat.rows
            if capture.rows > 1:
                rows = rows.at(whole.shape, seat.axis, seat.inner)
            capture.tracker.give(whole, rows)
            return whole
    raise ValueError(f"an output of shape {tuple(value.shape[1:])} has no batch axis")
