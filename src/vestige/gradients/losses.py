"""The loss that backward starts from: is it a sum or a mean of what the rows give one by one?

The engine needs d loss_i / d theta. The autograd graph of the loss is there when backward is
called, with all that its operations have saved, so its way from the root to the model's outputs can
be read before a gradient flows. A loss passes if it is linear in numbers that each belong to one
row, and if what it divides by is known from shapes. Three kinds of place are told apart:

    SCALAR   the rows are summed up: only linear operations may follow
    LINEAR   rows are there, and all that follows is linear
    ROWS     rows are there, and something that follows is not: they must not meet

A mean over the targets that are not ignored is sum_t l_t / k, with a k that other rows move. Such
a mean is taken over all targets N instead: the gradient that enters it is multiplied by k / N, on
the device and whatever the data is. So is l.sum() / mask.sum(), which label smoothing uses, too.

Guarantee: with a loss that passes, a row's gradient depends on that row, on weights, on shapes and
on constants alone. Numbers that the loop counts and turns into Python ones (`.item()`) look like
constants: a divisor of a sum must be a multiple of the rows, and no more is known about it.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from vestige.errors import PrivacyError
from vestige.gradients.broadcasts import Broadcasts, Operands
from vestige.gradients.layouts import Layouts
from vestige.gradients.nodes import (
    KEEPS,
    OF_A_LOSS,
    OVER_AN_AXIS,
    PRODUCTS,
    SIDE_BY_SIDE,
    below,
    children,
    dims,
    factor,
    factors_below,
    input_sizes,
    is_leaf,
    is_multiple,
    linear_below,
    multiply,
    name_of,
    reduction,
    row_axis,
    row_taken,
    shape_of,
    summed,
)

_ROW_FORM = (
    "Make one loss per row, such as F.cross_entropy(logits, y, reduction='none') and a mean "
    "within each row, and call engine.backward(losses)."
)


class Place(Enum):
    """Where in the loss a node is, seen from the root."""

    SCALAR = "scalar"
    LINEAR = "linear"
    ROWS = "rows"


@dataclass(frozen=True)
class _Way:
    """How a node's result comes to the root."""

    place: Place
    numbers: tuple[float, ...] = ()  # the constants that it is multiplied with
    averaged: bool = False  # under a mean, whose count must not depend on content
    whole: bool = False  # a count from the loop was replaced: the sum is a mean already


class LossGraph:
    """Reads the graph of one loss of a batch of `rows`, declared as their mean or their sum.

    `inside` are the sequence numbers [first, last) of the model's own nodes, `elsewhere` those of
    other forward passes, `parameters` the ids of the model's parameters, `axis` that of the rows,
    `operands` what the loop has put beside outputs.
    """

    def __init__(
        self,
        rows: int,
        mean: bool,
        inside: Sequence[tuple[int, int]],
        elsewhere: Sequence[tuple[int, int]],
        parameters: set[int],
        axis: int,
        operands: Operands,
    ) -> None:
        self.rows, self.mean, self.axis = rows, mean, axis
        self._inside, self._elsewhere, self._parameters = inside, elsewhere, parameters
        self._layouts = Layouts(rows, axis, self._is_inside)
        self._broadcasts = Broadcasts(rows, axis, operands, self._layouts, self._is_inside)
        self.unread: str | None = None  # an operation that nothing is known about

    def check(self, root: Tensor) -> None:
        """PrivacyError if rows meet in the loss or its reduction is not the declared one."""
        try:
            self._walk(root)
        except PrivacyError:
            if not self._has_strangers(root):
                raise
            # The capture or the guard on the parameter refuses it, and says more.
            self.unread = "a part of another forward pass"

    def _walk(self, root: Tensor) -> None:
        for node in self.in_the_loop(root):
            if is_leaf(node):
                self._check_leaf(node.variable)
        place = Place.SCALAR if root.numel() == 1 else Place.ROWS
        todo: list[tuple[Any, _Way]] = [(root.grad_fn, _Way(place))]
        seen: set[tuple[Any, _Way]] = set()  # holds the nodes, so that they stay themselves
        while todo:
            node, way = todo.pop()
            if (node, way) in seen:
                continue
            seen.add((node, way))
            if not is_leaf(node):
                todo += self._visit(node, way, self._is_inside(node))
        self._meeting(self._layouts.unclear or self._broadcasts.unclear)

    def concerns(self, root: Tensor) -> bool:
        """Whether the model has a part in this loss."""
        return any(self._is_inside(node) for node in self.in_the_loop(root))

    def _has_strangers(self, root: Tensor) -> bool:
        """Whether parameters are used outside of the model, or outputs for other rows."""
        for node in self.in_the_loop(root):
            number = node._sequence_nr()
            if any(first <= number < last for first, last in self._elsewhere):
                return True
            if is_leaf(node) and id(node.variable) in self._parameters:
                return True
        return False

    def in_the_loop(self, root: Tensor) -> Iterator[Any]:
        """The nodes above the model, and its outermost ones."""
        return below([root.grad_fn], lambda node: not self._is_inside(node))

    def _is_inside(self, node: Any) -> bool:
        number = node._sequence_nr()
        return any(first <= number < last for first, last in self._inside)

    def _check_leaf(self, leaf: Tensor) -> None:
        if id(leaf) in self._parameters:
            return  # the guard on it refuses
        raise PrivacyError(
            f"the loss trains a tensor of shape {tuple(leaf.shape)} that is no parameter of the "
            "model: its gradient is a raw sum over private rows. Freeze it (requires_grad_(False)),"
            " detach it, or make it a parameter of the model."
        )

    # -- one node -----------------------------------------------------------------------------

    def _visit(self, node: Any, way: _Way, inside: bool) -> Iterator[tuple[Any, _Way]]:
        """The nodes below, and their ways to the root."""
        name = name_of(node)
        if inside and way.place is not Place.SCALAR and name not in OF_A_LOSS:
            return
        if way.averaged:
            self._check_picks(node, name)
        if isinstance(node, BackwardCFunction):
            self.unread = self.unread or name
            if way.place is Place.SCALAR:
                return
        elif reduction(node):
            way = self._loss(node, name, way)
        elif name in ("Sum", "Mean") and way.place is not Place.ROWS:
            way = self._sum(node, name, way)
        elif name in ("Mul", "Div") and way.place is not Place.ROWS:
            way = self._scaled(node, name, way)
        elif name not in KEEPS or (way.place is Place.SCALAR and name in ("Where", "MaskedFill")):
            way = self._nonlinear(node, name, way)
        if way.place is not Place.SCALAR and not inside:
            self._meeting(self._broadcasts.meeting(node))
        if way.place is Place.ROWS and not inside and self.rows > 1:
            self._check_meeting(node, name)
            if name not in SIDE_BY_SIDE and len(self._rows_of(node, SIDE_BY_SIDE) - {-1}) > 1:
                self._meeting(f"{name} puts single rows together")
            self._meeting(self._layouts.meeting(node))
        for child in children(node):
            yield child, way

    def _loss(self, node: Any, name: str, way: _Way) -> _Way:
        """torch's losses, which average over their targets or add them up."""
        counted = name in ("NllLoss", "NllLoss2D")
        averages = reduction(node) == 1
        count = (node._saved_target if counted else node._saved_self).numel()
        if counted and averages:
            multiply(node, node._saved_total_weight / count)
        if self._of_one_row(node):
            if way.place is Place.SCALAR:
                self._check_reduction(name, False, way)
            return _Way(Place.ROWS)
        if way.place is not Place.SCALAR:
            self._meeting(f"{name} reduces the rows of the batch, and its result is used again")
        if counted and averages and node._saved_weight is not None and self.rows > 1:
            raise PrivacyError(
                f"the loss is a class-weighted mean ({name} with weights for "
                f"{node._saved_weight.numel()} classes), which divides by the weights of the whole "
                f"batch and so couples its rows. {_ROW_FORM}"
            )
        self._check_count(name, count)
        self._check_reduction(name, averages, way)
        return _Way(Place.ROWS, averaged=averages or way.averaged)

    def _sum(self, node: Any, name: str, way: _Way) -> _Way:
        """A sum or mean over some axes."""
        sizes = node._saved_self_sym_sizes
        if way.place is Place.LINEAR:
            return way
        if self._of_one_row(node):
            self._check_reduction(name, False, way)
            return _Way(Place.ROWS)
        if self._rows_are_gone(node) or not (self._has_rows(sizes) or self._reads_rows(node)):
            return way
        self._check_count(name, math.prod(sizes))
        inside = self._is_inside(node)
        below = factors_below(node, lambda n: not inside and self._is_inside(n))
        numbers = (*way.numbers, *below)
        self._check_reduction(name, name == "Mean", replace(way, numbers=numbers))
        return _Way(Place.LINEAR, averaged=name == "Mean" or way.averaged)

    def _scaled(self, node: Any, name: str, way: _Way) -> _Way:
        """A product with a constant, or a quotient by one."""
        value = factor(node)
        if value is not None:
            return _Way(way.place, (*way.numbers, value), way.averaged, way.whole)
        edges = [bool(child) for child, _ in node.next_functions]
        if (all(edges) and len(edges) > 1) or (name == "Div" and not edges[0]):
            return self._nonlinear(node, name, way)
        other = node._saved_other if edges[0] else node._saved_self
        if other.numel() != 1 and way.place is Place.LINEAR:
            return way  # a mask, or weights of positions
        return self._counted(node, name, other, way)

    def _counted(self, node: Any, name: str, other: Tensor, way: _Way) -> _Way:
        """What is divided by a tensor without rows: a count from the batch, for all we know."""
        one = self._of_one_row(node)
        count = summed(node) if way.place is Place.SCALAR and name == "Div" else None
        if count is not None and not one and count % self.rows:
            count = None
        if count is None or other.numel() != 1 or not (self.mean or one):
            if self.rows == 1 or one:
                return way
            verb = "divides" if name == "Div" else "multiplies"
            raise PrivacyError(
                f"the loss {verb} by a tensor of shape {tuple(other.shape)} that has no rows of the"
                " batch, which could couple them: a count of all its tokens, or the scale of "
                "torch.amp.GradScaler (leave it out: bf16 autocast needs no scaler). A constant "
                f"must be a Python number. {_ROW_FORM}"
            )
        multiply(node, other / count)
        return _Way(Place.SCALAR, way.numbers, averaged=True, whole=not one)

    # -- what is refused ----------------------------------------------------------------------

    def _has_rows(self, sizes: Sequence[int]) -> bool:
        return math.prod(sizes) % self.rows == 0

    def _check_count(self, name: str, count: int) -> None:
        if count % self.rows:
            raise PrivacyError(
                f"the loss reduces ({name}) {count} values, which is no multiple of the "
                f"{self.rows} rows of the batch: positions were picked by their content, and their "
                f"number couples the rows. Multiply by the mask instead of indexing with it. "
                f"{_ROW_FORM}"
            )

    def _check_reduction(self, name: str, averages: bool, way: _Way) -> None:
        if averages == self.mean or self.rows == 1 or way.whole:
            return
        wanted = [1 / x if self.mean and x else x for x in way.numbers]
        if not any(is_multiple(x, self.rows) for x in wanted):
            did, declared = ("mean", "sum") if averages else ("sum", "mean")
            by = "multiplied" if averages else "divided"
            raise PrivacyError(
                f"the loss is a {did} ({name}) that is not {by} by the {self.rows} rows of the "
                f"batch, but loss_reduction={declared!r} is declared: an example's weight would "
                f"depend on how many others are in its lot. Declare loss_reduction={did!r}, or "
                "call engine.backward(losses) with one loss per row."
            )

    def _check_picks(self, node: Any, name: str) -> None:
        """Under a mean, the number of positions must not follow from their content."""
        picked = name == "MaskedSelect"
        if name == "Index" and node._saved_indices:
            masks = [i for i in node._saved_indices if i is not None]
            first = node._saved_indices[0] is not None
            rows_first = node._saved_self_sym_sizes[0] == self.rows == shape_of(node)[0]
            picked = any(i.dtype in (torch.bool, torch.uint8) for i in masks) or (
                first and not rows_first
            )
        if picked and self.rows > 1 and not self._of_one_row(node):
            raise PrivacyError(
                "the loss is a mean over positions that were picked by their content (a mask as an "
                "index), whose number couples the rows of the batch. Multiply by the mask instead "
                f"of indexing with it. {_ROW_FORM}"
            )

    def _check_meeting(self, node: Any, name: str) -> None:
        """Rows must not meet where something nonlinear follows."""
        if name in PRODUCTS:
            both = [node.next_functions[i][0] for i in PRODUCTS[name]]
            if all(both) and len(shape_of(node)) <= 2:
                self._meeting(f"a product of two outputs ({name}) compares rows with each other")
        if name.endswith("BatchNorm") and getattr(node, "_saved_training", False):
            self._meeting(f"{name} in training mode normalises over the batch")
        if name in OVER_AN_AXIS and not self._of_one_row(node):
            sizes, over = input_sizes(node), dims(node)
            axis = row_axis(sizes, self.axis)
            whole = not over and self._has_rows(sizes)
            if whole or (sizes and sizes[axis] == self.rows and axis in over):
                self._meeting(f"{name} goes over the rows of the batch, and more follows")

    def _meeting(self, what: str | None) -> None:
        if what and self.rows > 1:
            raise PrivacyError(
                f"examples meet in the loss: {what}. A row's gradient would depend on the other "
                f"rows. {_ROW_FORM}"
            )

    def _nonlinear(self, node: Any, name: str, way: _Way) -> _Way:
        """Something that is not linear follows: fatal for what was reduced over the batch."""
        if way.place is Place.SCALAR and self._of_one_row(node):
            self._check_reduction(name, False, way)
        elif way.place is Place.SCALAR and self.rows > 1:
            raise PrivacyError(
                f"the loss applies {name} to a number that was already reduced over the batch, so "
                f"that a row's gradient depends on the other rows. {_ROW_FORM}"
            )
        return _Way(Place.ROWS, averaged=way.averaged)

    # -- one row by itself --------------------------------------------------------------------

    def _of_one_row(self, node: Any) -> bool:
        """Whether all that a node is made of belongs to one row (out[i], out[i : i + 1])."""
        rows = self._rows_of(node)
        return len(rows) == 1 and -1 not in rows

    def _rows_of(self, node: Any, stop: Collection[str] = ()) -> set[int]:
        """The single rows that a node is made of; -1 is among them if there is more to it."""
        inside = self._is_inside(node)
        todo, seen, rows = list(node.next_functions), set[Any](), set[int]()
        while todo:
            child, output = todo.pop()
            if child is None or (child, output) in seen:
                continue
            seen.add((child, output))
            row = row_taken(child, output, self.rows, self.axis)
            if row is not None and (inside or not self._is_inside(child)):
                # The pick that is nearest to the model: positions may be as many as rows.
                rows |= (self._rows_of(child, stop) - {-1}) or {row}
            elif self._is_inside(child) and not (inside and name_of(child) in OF_A_LOSS):
                rows.add(-1)
            elif name_of(child) not in stop:
                todo += child.next_functions
        return rows

    def _reads_rows(self, node: Any) -> bool:
        """Whether numbers that are too few or too many for the rows were picked from their own."""
        return any(self._has_rows(shape_of(part)) for part in linear_below(node))

    def _rows_are_gone(self, node: Any) -> bool:
        """Whether a sum below was over the rows: as many numbers as rows are left by chance."""
        for part in linear_below(node):
            sizes = input_sizes(part)
            axis = row_axis(sizes, self.axis)
            summed = name_of(part) in ("Sum", "Mean") and len(sizes) > 1 and axis in dims(part)
            if summed and sizes[axis] == self.rows:
                return True
        # Or there are as many terms, torch.stack([loss, penalty]).sum(), as rows.
        first = children(node)[0]
        terms = children(first) if name_of(first) == "Stack" else []
        terms = [t if name_of(t) != "Unsqueeze" else children(t)[0] for t in terms]
        return bool(terms) and len(set(terms)) == len(terms) and not self._rows_of(first) - {-1}
