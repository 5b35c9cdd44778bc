"""How an operation's arguments relate to the parameters and to the rows of the batch."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor

from vestige.errors import ConfigError, UnsupportedModel
from vestige.gradients.groups import Slot
from vestige.gradients.uses import Use, Viewed


class Uncovered(UnsupportedModel):
    """An operation used a parameter in a way that no rule covers.

    Inside a submodule it makes that module run row by row; otherwise the user sees it.
    """

    def __init__(self, what: str) -> None:
        super().__init__(what)
        self._what, self._where = what, ""

    def locate(self, where: str) -> None:
        """Name the module that was running."""
        self._where = self._where or where

    def __str__(self) -> str:
        where = f" in {self._where}" if self._where else ""
        return (
            f"{self._what}{where}, for which no per-example gradient rule exists. Move "
            "that parameter and its use into a submodule of its own (it then runs row by row), "
            "use a covered layer, or freeze the parameter."
        )


@dataclass(frozen=True)
class Source:
    """A tensor that stands for a parameter: the parameter itself, or rows looked up in it.

    A lookup that is the same for every example (position embeddings) has no batch rows; its result
    is treated like a parameter until it meets a batched tensor, and `attribute` then turns a use of
    the result into a use of the parameter.
    """

    slot: Slot
    tensor: Tensor
    attribute: Callable[[Use], Use] | None = None


@dataclass(frozen=True)
class Ref:
    """A source, or a strided view of one, as an operation's argument; `value` is detached."""

    source: Source
    value: Tensor
    is_view: bool

    @property
    def slot(self) -> Slot:
        """The parameter."""
        return self.source.slot

    def use(self, use: Use) -> tuple[Slot, Use]:
        """Attribute a use of this argument to the parameter."""
        if self.is_view:
            use = Viewed(use, self.source.tensor, self.value)
        if self.source.attribute is not None:
            use = self.source.attribute(use)
        return self.slot, use


def does_not_fit(operation: str, given: Sequence[Tensor], error: Exception) -> ConfigError:
    """The error for tensors that torch refuses to run an operation with a parameter on."""
    tensors = "; ".join(
        f"{str(t.dtype).removeprefix('torch.')} of shape {tuple(t.shape)}" for t in given[:2]
    )
    said = (str(error).splitlines() or [type(error).__name__])[0]
    return ConfigError(
        f"{operation} does not take what it is given: {tensors} (torch: {said[:200]}). Give the "
        "model rows of the shape, type and range that it was built for, such as x.float()."
    )


_PLAIN = {type(None), bool, int, float, str}  # most arguments: asked first


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested sequences, mappings, slices and dataclasses."""
    if type(tree) in _PLAIN:
        return
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list | deque | set):
        for item in tree:
            if isinstance(item, Tensor):  # most items: a generator for each would cost more
                yield item
            elif type(item) not in _PLAIN:
                yield from tensors_in(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from tensors_in(item)
    elif isinstance(tree, slice):
        yield from tensors_in((tree.start, tree.stop, tree.step))
    elif is_dataclass(tree) and not isinstance(tree, type):
        yield from tensors_in(vars(tree) if hasattr(tree, "__dict__") else ())


def overlaps(view: Tensor) -> bool:
    """Whether two entries of a strided view share a place in memory."""
    reach = 0
    for stride, size in sorted(zip(view.stride(), view.shape, strict=True)):
        if size == 1:
            continue
        if stride <= reach:
            return True
        reach += stride * (size - 1)
    return False
