"""The generic rule: a module that does something uncovered runs one row at a time under vmap.

While the root module runs, the forward method of every submodule with trainable parameters is
shadowed on the instance (and put back after). If one of its operations is uncovered, the innermost
such module with batched inputs is run again by `torch.func.vmap`, each row with its own copy of the
module's parameters, so that autograd returns per-example gradients. They are held for that module
only, rows x its parameters; the root itself is never run so.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils import _pytree as pytree

from vestige.errors import UnsupportedModel
from vestige.gradients.capture import Capture
from vestige.gradients.refs import Uncovered

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
        self._needed: set[nn.Module] = set()

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
        try:
            yield
        finally:
            for _, module in shadowed:
                module.__dict__.pop("forward", None)

    def _shadow(self, capture: Capture, name: str, module: nn.Module) -> Callable[..., Any]:
        original = type(module).forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if capture.paused:
                return original(module, *args, **kwargs)
            if module not in self._needed:
                capture.inside.append(f"{type(module).__name__} {name!r}")
                try:
                    return original(module, *args, **kwargs)
                except Uncovered:
                    # Without batched inputs the enclosing module has to run row by row.
                    leaves = pytree.tree_leaves((args, kwargs))
                    if not any(_is_batched(capture, leaf) for leaf in leaves):
                        raise
                finally:
                    capture.inside.pop()
                self._needed.add(module)
            return self._row_by_row(capture, name, module, args, kwargs)

        return forward

    def _row_by_row(
        self, capture: Capture, name: str, module: nn.Module, args: Any, kwargs: Any
    ) -> Any:
        axis, rows = capture.axis, capture.rows
        leaves, spec = pytree.tree_flatten((args, kwargs))
        split = [i for i, leaf in enumerate(leaves) if _is_batched(capture, leaf)]
        lifted = {}
        for key, parameter in module.named_parameters():
            ref = capture.find(parameter)
            if ref is None:
                continue
            lifted[key] = capture.lift(ref, (rows, *parameter.shape), 0)

        def one(parameters: dict[str, Tensor], *columns: Tensor) -> Any:
            row = list(leaves)
            for i, column in zip(split, columns, strict=True):
                row[i] = column.unsqueeze(axis)  # the module sees a batch of one
            row_args, row_kwargs = pytree.tree_unflatten(row, spec)
            out = functional_call(module, parameters, row_args, row_kwargs)
            return pytree.tree_map(lambda t: _only_row(t, axis), out)

        capture.paused = True
        try:
            in_dims = (0, *[axis] * len(split))
            run = vmap(one, in_dims, out_dims=axis, randomness="different")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "There is a performance drop", UserWarning)
                out = run(lifted, *(leaves[i] for i in split))
            capture.mark(out)
            return out
        except (RuntimeError, ValueError) as error:
            raise UnsupportedModel(
                f"{type(module).__name__} {name!r} has no per-example gradient rule and "
                f"could not be run one row at a time ({str(error).splitlines()[0]}). Use a covered "
                "layer in its place, or freeze its parameters."
            ) from error
        finally:
            capture.paused = False


def _is_batched(capture: Capture, value: Any) -> bool:
    return (
        isinstance(value, Tensor)
        and value.ndim > capture.axis
        and value.shape[capture.axis] == capture.rows
        and capture.is_marked(value)
    )


def _only_row(value: Any, axis: int) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim <= axis or value.shape[axis] != 1:
        raise ValueError(f"an output of shape {tuple(value.shape)} has no batch axis")
    return value.squeeze(axis)
