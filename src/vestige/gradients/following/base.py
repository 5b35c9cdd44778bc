"""What the families of operations share: reading labels, and saying that rows meet or are lost."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Rows, Summed

Result = Label | None | list[Label | None]
Family = Callable[["Call"], Result]

SUMMED = Summed()  # to be named after the operation


class Lost(Exception):  # noqa: N818 - it is caught where the label is made
    """The family does not cover this call; its argument may say why."""


class Meet(Exception):  # noqa: N818
    """Rows meet in this call."""


class Call:
    """One call of an operation: what it was given, the labels of that, and what it gave.

    Labels of a single row come to `like` alone, and to what puts rows together: see `follow`.
    """

    __slots__ = ("_labels", "args", "kwargs", "out", "unseen")

    def __init__(
        self, labels: Mapping[int, Label], args: tuple[Any, ...], kwargs: dict[str, Any], out: Any
    ) -> None:
        self._labels, self.args, self.kwargs, self.out = labels, args, kwargs, out
        self.unseen = set(labels)  # labelled arguments that the family has not looked at

    def see(self, tensor: Tensor) -> Label | None:
        """The label of an argument; None for a constant."""
        self.unseen.discard(id(tensor))
        return self._labels.get(id(tensor))

    def labels(self, *values: Any) -> list[Label]:
        """The labels in some arguments."""
        return [label for t in tensors_in(values) if (label := self.see(t)) is not None]

    def argument(self, at: int, name: str, default: Any = None) -> Any:
        """An argument by its position or name."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[at] if len(self.args) > at else default

    def axis(self, at: int, default: Any = None, name: str = "dim") -> int:
        """An argument that is an axis of the first, counted from the front."""
        return from_front(self.argument(at, name, default), self.value.ndim)

    @property
    def value(self) -> Tensor:
        """The first argument."""
        return self.args[0]  # type: ignore[no-any-return]

    @property
    def label(self) -> Label | None:
        """The first argument's label."""
        return self.see(self.args[0])

    @property
    def rows(self) -> Rows:
        """The first argument's rows."""
        return rows_of(self.see(self.args[0]))

    @property
    def place(self) -> tuple[int, int]:
        """(axis, inner): where the first argument has its rows."""
        return place_of(self.see(self.args[0]), self.args[0].shape)

    @property
    def result(self) -> Tensor:
        """The first tensor of what the operation gave."""
        return self.out if isinstance(self.out, Tensor) else next(tensors_in(self.out))

    def refuse_others(self, what: type[Exception], first: int = 1) -> None:
        """Raise `what` if an argument from position `first` on has a label."""
        if self.labels(self.args[first:], self.kwargs):
            raise what

    def joint(self, tensors: Any, where: Callable[[Tensor, int], int]) -> Rows:
        """The rows that several arguments give the result, on axis `where(argument, axis)`."""
        labels = []
        for tensor in tensors_in(tensors):
            if (label := self.see(tensor)) is not None:
                axis, inner = place_of(label, tensor.shape)
                after = where(tensor, axis)
                labels.append(rows_of(label).at(self.result.shape, after, inner))
        return agreed(labels)

    def stays(self, axis: int, inner: int, out: Tensor | None = None) -> Rows:
        """The first argument's rows, on an axis of the result."""
        return self.rows.at((self.result if out is None else out).shape, axis, inner)


def rows_of(label: Label | None) -> Rows:
    if not isinstance(label, Rows):
        raise Meet if isinstance(label, Summed) or not getattr(label, "lost", True) else Lost
    return label


def place_of(label: Label | None, shape: Sequence[int]) -> tuple[int, int]:
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


def from_front(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


def aligned(label: Label | None, shape: Sequence[int], out: Sequence[int]) -> Rows:
    """The rows of an argument that is broadcast to the shape `out`."""
    rows = rows_of(label)
    if list(shape) == list(out):
        return rows
    axis, inner = place_of(rows, shape)
    after = axis + len(out) - len(shape)
    if after < 0 or out[after] != shape[axis]:
        raise Lost
    return rows.at(out, after, inner)


def ordered(owners: Tensor, shape: Sequence[int], axis: int, batch: int) -> Rows:
    """Rows in the order of `owners` along an axis; without an order where it is the plain one."""
    suffix = prod(shape[axis + 1 :])
    if len(owners) % batch == 0 and len(owners):
        plain, inner = torch.arange(len(owners), device=owners.device), len(owners) // batch
        if torch.equal(owners, plain % batch):
            return Rows(suffix, batch)
        if inner > 1 and torch.equal(owners, plain.div(inner, rounding_mode="floor")):
            return Rows(suffix * inner, batch)
    return Rows(suffix, batch, owners)


def sliced(rows: Rows, value: Tensor, part: slice, out: Tensor, after: int) -> Rows:
    """A slice of the axis that has the rows, which is axis `after` of the result."""
    axis, inner = place_of(rows, value.shape)
    if part == slice(None) or rows.count == 0:
        return rows.at(out.shape, after, inner)
    start, stop, step = part.indices(value.shape[axis])
    whole = inner * rows.count
    if start % whole == 0 and step == 1 and (stop - start) % whole == 0 and stop > start:
        return rows.at(out.shape, after, inner)
    owners = rows.owners(value.shape, axis, inner, value.device)[part]
    return ordered(owners, out.shape, after, rows.batch)


def picked(rows: Rows, value: Tensor, index: Any) -> Rows:
    """One index of the axis that has the rows: a single row."""
    axis, inner = place_of(rows, value.shape)
    owners = rows.owners(value.shape, axis, inner, value.device)
    return Rows(1, rows.batch, owners[index].reshape(1))
