"""What the loop makes of outputs and labels without a gradient, before it enters a loss.

A threshold, a baseline or a centre that is computed from detached outputs, or from the labels of a
lot, has no node in the graph of the loss: there it looks like any constant. It is followed here, by
the rules that follow rows through a model, from the model's outputs and the tensors of the batch
on. A gradient is refused that depends on a number which several rows have made. What no rule
follows is taken for a constant, as everything is that the loop computes before the forward pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from vestige.errors import PrivacyError
from vestige.gradients.following import follow, name_of
from vestige.gradients.hooks import FACTS
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Meeting, Rows

_MARK = "vestige coupled"  # on a node: what it was given of several rows

_OF_ALL = {"bincount", "histc", "histogram", "unique", "unique_consecutive"}  # counts of rows


class LoopConstants:
    """The rows of what the loop holds, from one forward pass to its backward pass.

    Guarantee: what is refused does depend on several rows.
    """

    def __init__(self) -> None:
        self._labels: WeakIdKeyDictionary = WeakIdKeyDictionary()  # and the version they are of
        self._rows = 0

    def start(self, rows: int) -> None:
        """A batch of as many rows."""
        self._labels.clear()
        self._rows = rows

    def give(self, tensors: Iterable[Tensor], axis: int) -> None:
        """Tensors that have the batch's rows, in order, where an axis is as long."""
        for t in tensors:
            if self._rows > 1 and t.ndim > axis and t.shape[axis] == self._rows:
                self._set(t, Rows(1, self._rows).at(t.shape, axis, 1))

    def _set(self, tensor: Tensor, label: Label) -> None:
        self._labels[tensor] = label, _changes(tensor)

    def label(self, tensor: Tensor) -> Label | None:
        """Whose entries a tensor has; None where nothing is known."""
        label, version = self._labels.get(tensor, (None, 0))
        return label if label is not None and version == _changes(tensor) else None

    def before(self, args: Any, kwargs: Any) -> dict[int, Label]:
        """The labels of a function's arguments, before it runs."""
        if not len(self._labels):
            return {}
        given = ((id(t), self.label(t)) for t in tensors_in((args, kwargs)))
        return {key: label for key, label in given if label is not None}

    def note(self, func: Any, given: dict[int, Label], args: Any, kwargs: Any, made: Any) -> None:
        """A function was given labelled tensors, and has `made` something of them."""
        if not given or func in FACTS:
            return
        if func is torch.Tensor.__setitem__:
            made = args[0]
        results = list(tensors_in(made))
        if not results:
            return
        labels = follow(func, given, args, kwargs, made)
        alone = {id(t) for t in tensors_in((args, kwargs)) if not t.requires_grad}
        for i, result in enumerate(results):
            label = labels[i] if isinstance(labels, list) else labels
            if isinstance(label, Meeting) and name_of(func) in _OF_ALL:
                label = Meeting(name_of(func))
            if label is None or (
                isinstance(label, Meeting) and (label.lost or _picks(func, given))
            ):
                if result.is_inference():  # it may be what was changed in place
                    self._labels.pop(result, None)
                continue  # unknown
            if isinstance(label, Meeting) and result.requires_grad:
                of_loss = [x for key, x in given.items() if key not in alone]
                if len(of_loss) < len(given) and not any(isinstance(x, Meeting) for x in of_loss):
                    self._mark(result, name_of(func))
                continue  # what the graph shows of it is for the graph to say
            self._set(result, label)

    def _mark(self, result: Tensor, name: str) -> None:
        with suppress(RuntimeError):  # one of several views that was written to: nobody can use it
            node: Any = result.grad_fn
            if node is not None:
                node.metadata.setdefault(_MARK, name)

    def check_inputs(self, given: Iterable[Tensor]) -> None:
        """PrivacyError if the model is given what mixes rows, or has them in another order."""
        for tensor in given:
            label = self.label(tensor)
            moved = isinstance(label, Rows) and label.order is not None
            if moved or (isinstance(label, Meeting) and tensor.ndim):
                raise PrivacyError(
                    "the model is given rows of the batch in another order than the loader gave, "
                    "or put together: what it makes of one row would count for another. Give it "
                    "the batch's own rows in their own order."
                )

    def check(self, nodes: Iterator[Any]) -> None:
        """PrivacyError if a loss depends on what several rows have made without a gradient."""
        for node in nodes:
            name = node.metadata.get(_MARK)
            if name is not None:
                raise PrivacyError(
                    f"examples meet in the loss: {name!r} puts an output beside a number that "
                    "several rows of the batch have made, without a gradient (a mean, a threshold "
                    "or a count of the lot, rows in another order). A row's gradient would depend "
                    "on the others. Make such numbers of public ones, or of each row alone."
                )


def _changes(tensor: Tensor) -> int:
    """How often a tensor was changed; of what inference mode makes, torch does not count it."""
    return 0 if tensor.is_inference() else tensor._version


def _picks(func: Any, given: dict[int, Label]) -> bool:
    """Whether a meeting is none for sure: rows that are picked by a number of one of them, or
    losses of the same rows, picked from outputs and labels alike."""
    labels = [label for label in given.values() if isinstance(label, Rows)]
    if len(labels) < len(given) or len(labels) < 2:
        return False
    orders = [label.order for label in labels]
    alike = all(
        a is not None and b is not None and torch.equal(a, b) for a, b in itertools.pairwise(orders)
    )
    return alike or name_of(func) == "__getitem__"
