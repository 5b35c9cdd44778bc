"""Where broadcasting in a loss lets a row meet numbers of the whole batch.

An output of shape (rows, 1) minus a target of shape (rows,) is (rows, rows) by torch's rules: each
row meets the labels of all. Labels have no node in the graph, so the slip shows by an axis that is
no axis of rows, that the model has not made, and that is as long as the batch. A constant may have
that length by chance, but keeps it in batches of another size, where labels change theirs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils.weak import WeakIdKeyDictionary

from vestige.gradients.apart import BY_NUMBER
from vestige.gradients.layouts import Layouts
from vestige.gradients.nodes import (
    SPREADS,
    below,
    is_leaf,
    name_of,
    row_axis,
    shape_of,
    signed,
)

Shape = tuple[int, ...]

_PRODUCTS = {"Mm": 0, "Bmm": 0, "Addmm": 1, "Baddbmm": 1}  # the place of the left matrix
_LOSSES = {"MseLoss", "SmoothL1Loss", "HuberLoss"}  # which spread their target by themselves
_ENTRYWISE = BY_NUMBER - {"nllloss", "nlllossnd"} | {name.lower() for name in _LOSSES}
_REPEATS = {"Repeat", "Index", "IndexSelect", "Gather"}
# These do not save all that they were given.
_UNSAVED = {"Add", "Sub", "Rsub", "Where", "Lerp", "Addcmul", "Addcdiv", *_PRODUCTS}
_WEIGHTED = {"Mul", "Div", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits"}  # by class
_SAVED = ("self", "other", "target", "condition", "mask", "min", "max", "exponent", "weight")
_REMEDY = (
    "an output (rows, 1) beside a target (rows,) does this: give both one shape, by "
    "target.unsqueeze(1) or output.squeeze(1)"
)
_GIVEN = "vestige given"  # on a node: the shapes of what it was given


class Operands:
    """What the loop puts beside outputs: its shapes, and the lengths of its axes batch by batch."""

    def __init__(self) -> None:
        # By an operation, an axis (-1 is the last) and its length: the rows of batches that had it.
        self._met: defaultdict[tuple[str, int, int], set[int]] = defaultdict(set)
        self._rows, self._of_labels = 0, set[int]()
        self._pairs: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of rows with rows, no gradient

    def start(self, rows: int, unit_rows: int) -> None:
        """A batch of as many rows, so many for each privacy unit."""
        self._rows, self._of_labels = rows, {rows, rows // unit_rows} - {1}
        self._pairs.clear()

    def may_be_labels(self, operation: str, back: int, length: int) -> bool:
        """Whether such an axis may follow the size of the batch."""
        met = self._met[operation, back, length]
        met.add(self._rows)
        return length in self._of_labels and len(met) == 1

    def note(self, made: Any, given: Sequence[Tensor], first: int) -> None:
        """A function has `made` something of what it was `given`: keep the shapes that no node
        saves. Its nodes have the sequence numbers from `first` on."""
        if not isinstance(made, Tensor) or self._rows == 1 or not _has_strides(made):
            return
        given = [t for t in given if _has_strides(t)]
        try:
            node = made.grad_fn
        except RuntimeError:
            return  # one of several views that was written to: torch lets nobody use it
        if node is None:
            self._note_pair(made, given)
        elif not is_leaf(node) and node._sequence_nr() >= first:
            shapes = [self._own_shape(t) for t in given if not (t.requires_grad or _is_weight(t))]
            for part in below([node], lambda n: not is_leaf(n) and n._sequence_nr() >= first):
                if None in [child for child, _ in part.next_functions]:
                    part.metadata.setdefault(_GIVEN, shapes)

    def _note_pair(self, made: Tensor, given: Sequence[Tensor]) -> None:
        """Every row beside every row, of tensors that have the rows once."""
        axes = [at for at, length in enumerate(made.shape) if length == self._rows]
        if len(axes) < 2 or not given or made.stride().count(0):
            return
        with suppress(RuntimeError):
            if torch.broadcast_shapes(*(t.shape for t in given)) != made.shape:
                return
            shapes = [self._own_shape(t) for t in given]
            if not any(_has(s, [at - made.ndim for at in axes], made.shape) for s in shapes):
                self._pairs[made] = (*(1 for _ in made.shape[:-1]), made.shape[-1])

    def _own_shape(self, tensor: Tensor) -> Shape:
        """A tensor's shape without axes along which it was expanded."""
        pair: Shape | None = self._pairs.get(tensor)
        shape = zip(tensor.shape, tensor.stride(), strict=True)
        return pair or tuple(length if stride else 1 for length, stride in shape)

    def of(self, node: Any) -> list[Shape] | None:
        """The shapes of what an operation was given beside outputs; None if they are not known."""
        hidden = None in [child for child, _ in node.next_functions]
        if hidden and _GIVEN in node.metadata:
            return list(node.metadata[_GIVEN])
        if hidden and name_of(node) in _UNSAVED:
            return None
        saved = [getattr(node, f"_saved_{key}", None) for key in _SAVED]
        return [self._own_shape(value) for value in saved if isinstance(value, Tensor)]


class Broadcasts:
    """Finds outputs that are spread over all rows, and rows that are spread over all labels.

    Guarantee: an axis of such a length that an operation adds to rows is told, unless the model's
    outputs have it, or something that has rows, or batches of another size.
    """

    def __init__(
        self,
        rows: int,
        axis: int,
        operands: Operands,
        layouts: Layouts,
        inside: Callable[[Any], bool],
    ) -> None:
        self._rows, self._axis, self._operands = rows, axis, operands
        self._layouts, self._inside = layouts, inside
        self.unclear: str | None = None  # how rows may meet labels in a node that was asked of

    def meeting(self, node: Any) -> str | None:
        """How rows meet in a node, if they are seen to."""
        name, out = name_of(node), shape_of(node)
        if self._rows == 1:
            return None  # nor is anything to be learnt of lengths: rows have none
        for back, length in self._added(node, name):
            if self._operands.may_be_labels(name, back, length) and not self.unclear:
                self.unclear = (
                    f"{name} spreads an output of shape {_first_size(node)} along an axis of "
                    f"{length}, on which may be the labels of all {self._rows} rows ({_REMEDY}; a "
                    "constant of that length is told from labels in batches of another size only)"
                )
        axis = row_axis(out, self._axis)
        if name not in SPREADS or len(out) <= axis or out[axis] != self._rows:
            return None
        for child, number in _children(node):
            shape = _size(child, number)
            if not is_leaf(child) and ((1,) * (len(out) - len(shape)) + shape)[axis] == 1:
                remedy = f" ({_REMEDY})" if self._row_axes(child, number) else ""
                return f"{name} spreads an output of shape {shape} over all rows{remedy}"
        return None

    def _added(self, node: Any, name: str) -> Iterable[tuple[int, int]]:
        """The axes, with their lengths, that something without rows may have given to rows."""
        children = _children(node)
        if name in _PRODUCTS:
            yield from self._columns(node, _PRODUCTS[name])
        elif name.lower() in _ENTRYWISE:
            yield from self._entrywise(node, name)
        elif name not in ("Expand", "Sum", "Mean"):
            out = shape_of(node)
            same = len(set(children)) == 1 < len(children)
            if name in ("Cat", "Stack") and same and self._row_axes(*children[0]):
                yield signed(node._saved_dim) % len(out) - len(out), len(children)
            for child in children:
                size, rows = _size(*child), self._row_axes(*child)
                for back in set(range(-len(size), 0)) - rows:
                    if name in _REPEATS and len(size) == len(out) and size[back] == 1 < out[back]:
                        yield back, out[back]
                    elif size[back] > 1 and not self._is_made(*child, back, size[back]):
                        yield back, size[back]

    def _entrywise(self, node: Any, name: str) -> Iterable[tuple[int, int]]:
        """The axes that something without rows gives, or is alone in having beside the model."""
        children, out = _children(node), shape_of(node)
        rows = {back for child in children for back in self._row_axes(*child)}
        given = self._operands.of(node)
        with suppress(RuntimeError):  # a composed function was given what this part of it was not
            out = torch.broadcast_shapes(out, *(_size(*child) for child in children), *given or [])
        for back in range(-len(out), 0):
            if out[back] == 1 or back in rows:
                continue
            made = any(self._is_made(*child, back, out[back]) for child in children)
            if made and (given is None or not rows or name in _WEIGHTED):
                continue
            givers = [s for s in given or [] if _at(s, back) == out[back]]
            bare = all(_at(_size(*child), back) == 1 for child in children)
            unseen = bare and not givers and _GIVEN not in node.metadata
            if given is None or unseen or any(not _has(s, rows, out) for s in givers):
                yield back, out[back]

    def _columns(self, node: Any, first: int) -> Iterable[tuple[int, int]]:
        """The axes of a matrix product that a constant gives, unless it has rows, too."""
        out, inputs = shape_of(node), node.next_functions[first : first + 2]
        for back, (child, _), (other, number) in zip((-2, -1), inputs, inputs[::-1], strict=True):
            if child is None and other is not None and out[back] > 1:
                rows = self._row_axes(other, number)
                matrices, given = [axis for axis in rows if axis < -2], self._operands.of(node)
                if back not in rows and (
                    given is None
                    or any(out[back] in s and not _has(s, matrices, out) for s in given)
                ):
                    yield back, out[back]

    def _row_axes(self, node: Any, output: int) -> set[int]:
        """The axes, counted from the last, that rows lie along."""
        layout, size = self._layouts.of(node, output), _size(node, output)
        if layout is not None:
            return {at - len(size) for at in range(len(size)) if layout.has_rows(at)}
        at = row_axis(size, self._axis)
        return {at - len(size)} if size and size[at] == self._rows else set()

    def _is_made(self, node: Any, output: int, back: int, length: int) -> bool:
        """Whether an axis is no mere copy of an axis of one."""
        todo = [(node, output)]
        while todo:
            node, output = todo.pop()
            if _at(_size(node, output), back) != length:
                continue
            name = name_of(node)
            copies = name == "Expand" or name.lower() in _ENTRYWISE
            if is_leaf(node) or self._inside(node) or not copies:
                return True
            below = [c for c in _children(node) if _at(_size(*c), back) == length]
            if not below and name != "Expand":
                return True  # and was looked at there
            todo += below
        return False


def _children(node: Any) -> list[tuple[Any, int]]:
    return [(child, number) for child, number in node.next_functions if child]


def _size(node: Any, output: int) -> Shape:
    if is_leaf(node):
        return tuple(node.variable.shape)
    return tuple(node._input_metadata[output].shape)


def _first_size(node: Any) -> Shape:
    """The shape of the first output that an operation is given, before it was expanded."""
    child, number = _children(node)[0]
    while name_of(child) == "Expand":
        child, number = _children(child)[0]
    return _size(child, number)


def _at(shape: Shape, back: int) -> int:
    return shape[back] if len(shape) >= -back else 1


def _has(shape: Shape, rows: Collection[int], out: Shape) -> bool:
    return bool(rows) and all(_at(shape, back) == out[back] for back in rows)


def _is_weight(tensor: Tensor) -> bool:
    """Whether a tensor is a frozen layer's, which no label is."""
    return isinstance(tensor if tensor._base is None else tensor._base, Parameter)


def _has_strides(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_nested
