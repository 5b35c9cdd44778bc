"""What the families of operations share: reading labels, and saying that rows meet or are lost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor

from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Rows, Summed

See = Callable[[Tensor], Label | None]
Result = Label | None | list[Label | None]
Args = tuple[Any, ...]
Family = Callable[[See, Args, dict[str, Any], Any], Result]

# (axis, inner) with the rows: where they are in a result.
Place = tuple[int, int]

SUMMED = Summed()  # to be named after the operation


class Lost(Exception):  # noqa: N818 - it is caught where the label is made
    """The family does not cover this call; its argument may say why."""


class Meet(Exception):  # noqa: N818
    """Rows meet in this call."""


def labels_of(see: See, values: Iterable[Any]) -> list[Label]:
    return [label for t in tensors_in(list(values)) if (label := see(t)) is not None]


def rows_of(label: Label | None) -> Rows:
    if not isinstance(label, Rows):
        raise Meet if isinstance(label, Summed) or not getattr(label, "lost", True) else Lost
    return label


def place_of(label: Label | None, shape: Sequence[int]) -> Place:
    place = rows_of(label).place(shape)
    if place is None:
        raise Lost
    return place


def agreed(labels: Sequence[Rows]) -> Rows:
    """The one label of a result that several arguments give rows to."""
    first = labels[0]
    if not all(first.same(other) for other in labels[1:]):
        raise Meet
    return first


def argument(args: Args, kwargs: dict[str, Any], at: int, name: str, default: Any = None) -> Any:
    return kwargs[name] if name in kwargs else args[at] if len(args) > at else default


def from_front(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


def aligned(label: Rows, shape: Sequence[int], out: Sequence[int]) -> Rows:
    """The rows of an argument that is broadcast to the shape `out`."""
    if label.count == 1 or list(shape) == list(out):
        return label
    axis, inner = place_of(label, shape)
    after = axis + len(out) - len(shape)
    if after < 0 or out[after] != shape[axis]:
        raise Lost
    return label.at(out, after, inner)
