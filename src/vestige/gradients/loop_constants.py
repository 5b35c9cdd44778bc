"""What the loop makes of a batch and of outputs without a gradient, on its way into a loss.

A threshold, a baseline or a centre that is computed from detached outputs, or from the labels of a
lot, has no node in the graph of the loss: there it looks like any constant. Inputs that the loop
has mixed look like any others. Both are followed here, by the rules that follow rows through a
model, from the loader's tensors on. Refused is an input in which rows have met, and a gradient that
depends on a number which several rows have made. What no rule follows is taken for a constant.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from vestige.errors import PrivacyError
from vestige.gradients.following import follow, keeps_places, name_of
from vestige.gradients.hooks import FACTS
from vestige.gradients.loop_following import follow_in_loop, in_another_order
from vestige.gradients.modes import refuse_unseen_code
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Meeting, Rows, Summed
from vestige.sampling.loader import Batch

_SET_DATA: Any = Tensor.data.__set__  # type: ignore[attr-defined]
EARLIER = Meeting("what is left of an earlier batch")
_MARK = "vestige coupled"  # on a node: what it was given of several rows

# Of all rows, whatever axis they are on.
_OF_ALL = set(
    "bincount histc histogram unique unique_consecutive cov corrcoef dot vdot dist pdist".split()
)
_PICKS = {"__getitem__", "index_select", "take", "gather"}
_ADDS = set("add sub subtract __add__ __radd__ __sub__ __iadd__ __isub__ add_ sub_".split())
_DIVIDES = set("div divide true_divide __truediv__ __itruediv__ div_".split())


class LoopConstants:
    """The rows of what the loop holds, from the loader to the backward pass.

    Rows of one privacy unit count as one. Guarantee: what is refused does depend on several units.
    """

    def __init__(self, axis: int, of_outputs: Callable[[Tensor], bool]) -> None:
        self._axis, self._of_outputs = axis, of_outputs
        self._labels: WeakIdKeyDictionary = WeakIdKeyDictionary()  # and the version they are of
        self._rows = self._inner = 0
        self._wholes: WeakIdKeyDictionary = WeakIdKeyDictionary()  # of what shares their memory
        self._memory: dict[Any, tuple[Label, StorageWeakRef]] = {}  # labels by what has them
        self._order: Rows | None = None  # in which the model was given the batch
        self._shared: set[tuple[int, int]] = set()  # places in a batch of what has no rows

    def start(self, batch: Batch) -> None:
        """The loader hands out a batch."""
        self._labels = WeakIdKeyDictionary(  # what the loop has kept
            {t: (EARLIER, at) for t, (_, at) in list(self._labels.items()) if at == _version(t)}
        )
        self._wholes.clear()
        self._memory.clear()
        self._order = None
        self._rows, self._inner = 0 if batch.empty else batch.rows, batch.unit_rows
        for i, reference in enumerate(batch.given):
            tensor = reference()
            if tensor is None or not self.follows:
                continue
            if (row := batch.single.get(id(tensor))) is not None:
                unit = torch.tensor([row // self._inner])
                self._set(tensor, Rows(1, self._plain.batch, unit))
                continue
            place = len(batch.given), i
            axes = {a for a in (0, self._axis) if tensor.ndim > a and tensor.shape[a] == self._rows}
            if 0 not in axes and self._axis not in axes:
                self._shared.add(place)
            elif len(axes) == 1 and place not in self._shared:
                self._set(tensor, self._plain.at(tensor.shape, min(axes), self._inner))

    @property
    def follows(self) -> bool:
        """Whether there are several units that could meet."""
        return self._rows > self._inner

    @property
    def alive(self) -> bool:
        """Whether the loop still has something of the batch."""
        return any(
            getattr(label, "what", None) != EARLIER.what for label, _ in self._labels.values()
        )

    @property
    def _plain(self) -> Rows:
        return Rows(self._inner, self._rows // self._inner)

    def give(self, tensors: Iterable[Tensor], rows: Label | None = None) -> None:
        """Tensors that have the batch's rows where the axis is as long, unless more is known."""
        for t in tensors:
            if not self.follows or self.label(t) is not None:
                continue
            if t.ndim <= self._axis or t.shape[self._axis] != self._rows:
                continue
            label = rows or self._order or self._plain
            at = isinstance(label, Rows)
            self._set(t, label.at(t.shape, self._axis, self._inner) if at else label)  # type: ignore

    def _set(self, tensor: Tensor, label: Label) -> None:
        self._labels[tensor] = label, _version(tensor)
        if (memory := _memory(tensor)) is not None:
            self._memory[memory] = label, StorageWeakRef(tensor.untyped_storage())

    def label(self, tensor: Tensor) -> Label | None:
        """Whose entries a tensor has; None where nothing is known."""
        label, version = self._labels.get(tensor, (None, -1))
        if version == _version(tensor):
            return label  # type: ignore[no-any-return]
        if version == -1:  # torch makes aliases without a word: Variable(x), Parameter(x)
            known, storage = self._memory.get(_memory(tensor), (None, None))
            if storage is not None and not storage.expired():
                return known
        base = tensor._base
        whole = self.label(base) if base is not None else None
        return whole if isinstance(whole, Meeting) else None

    # -- one function -------------------------------------------------------------------------

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
        if func in (Tensor.__setitem__, Tensor.set_, _SET_DATA):
            made = args[0]
        if func in (Tensor.set_, _SET_DATA):
            self._labels.pop(made, None)  # other contents, of the same version
            if (label := given.get(id(args[1]))) is not None:
                self._set(made, label)
            return
        results = list(tensors_in(made))
        if not results:
            return
        first = given.get(id(args[0])) if args and len(given) == 1 and made is not args[0] else None
        if isinstance(first, Rows) and keeps_places(func) and made.shape == args[0].shape:
            if made.requires_grad:
                refuse_unseen_code()
            self._set(made, first)  # the common case, without ceremony
            return
        labels = self._follow(func, given, args, kwargs, made)
        name = name_of(func)
        if name in ("detach", ".data"):
            self._wholes[results[0]] = args[0]
        alone = {id(t) for t in tensors_in((args, kwargs)) if not t.requires_grad}
        of_loss = [x for key, x in given.items() if key not in alone]
        for i, result in enumerate(results):
            label = labels[i] if isinstance(labels, list) else labels
            if isinstance(label, Meeting) and name in _OF_ALL:
                label = Meeting(repr(name))
            lost = isinstance(label, Meeting) and (label.lost or _picks(func, given))
            if label is None or lost:
                if result.is_inference():  # it may be what was changed in place
                    self._labels.pop(result, None)
                continue  # unknown
            if result.requires_grad:
                refuse_unseen_code()
            chosen = _chooses(name, given, label) or in_another_order(func, given, args, result)
            met = isinstance(label, Meeting) and self._of_outputs(result)
            if result.requires_grad and (met or chosen):
                if _couples(name, given, of_loss) or chosen:
                    self._mark(result, name)
                if not chosen:
                    continue  # what the graph shows of it is for the graph to say
            self._set(result, label)
            self._pass_on(result, label, bool(args) and result is args[0])

    def _follow(self, func: Any, given: dict[int, Label], args: Any, kwargs: Any, out: Any) -> Any:
        """The label of what a function made, or one for each tensor in it."""
        if func is Tensor.__setitem__:
            single = given.get(id(args[2]))
            if isinstance(single, Rows) and single.count == 1:
                return self._row_put(given, args, single)
        return follow_in_loop(func, given, args, kwargs, out)

    def _row_put(self, given: dict[int, Label], args: Any, single: Rows) -> Label:
        """target[index] = one row: the target's label, if that is where the row belongs."""
        target, index, _ = args
        before = given.get(id(target))
        plain = target.ndim and target.shape[0] == self._rows
        if before is None and plain:
            before = self._plain.at(target.shape, 0, self._inner)
        if not isinstance(before, Rows):
            return before or Meeting("one row", lost=True)
        with torch._C.DisableTorchFunction():
            region = target.detach()[index]
        there = follow(Tensor.__getitem__, {id(target): before}, (target, index), {}, region)
        if isinstance(there, Rows) and there.count == 1:
            same = torch.equal(there.order.cpu(), single.order.cpu())  # type: ignore[union-attr]
            return before if same else Meeting("'__setitem__'")
        return Meeting("one row", lost=not isinstance(there, Rows))

    def _pass_on(self, result: Tensor, label: Label, in_place: bool) -> None:
        """What was written to a view is in the whole."""
        whole = self._wholes.get(result, result._base) if in_place else None
        if whole is None:
            return
        before = self._labels.get(whole, (None, 0))[0]
        if isinstance(label, Meeting) or isinstance(before, Rows):
            self._set(whole, label if isinstance(label, Meeting) else before)
            self._pass_on(whole, label, in_place)

    def _mark(self, result: Tensor, name: str) -> None:
        with suppress(RuntimeError):  # one of several views that was written to: nobody can use it
            node: Any = result.grad_fn
            if node is not None:
                node.metadata.setdefault(_MARK, name)

    def differentiate(self, inputs: Any, made: Any) -> None:
        """torch.autograd.grad has made gradients of `inputs`."""
        for tensor, gradient in zip(tensors_in(inputs), made, strict=False):
            if gradient is not None and (label := self.label(tensor)) is not None:
                self._set(gradient, label)

    # -- the model ----------------------------------------------------------------------------

    def joined(self, given: Iterable[Tensor]) -> Label | None:
        """What the outputs for these inputs have, if the model keeps rows apart."""
        labels = [label for t in given if (label := self.label(t)) is not None]
        met = next((x for x in labels if not isinstance(x, Rows)), None)
        if met is not None:
            return Meeting(met.what)
        rows = [x for x in labels if isinstance(x, Rows)]
        if any(x.count == 1 or not _in_order(x, rows[0]) for x in rows):
            return Meeting("the model")
        return rows[0] if rows else None

    def check_inputs(self, given: Iterable[Tensor]) -> None:
        """PrivacyError if the model is given what mixes rows, or has them in another order."""
        for tensor in given:
            label = self.label(tensor)
            if label is None or not self.follows:
                continue
            if not isinstance(label, Rows):
                raise PrivacyError(
                    f"the model is given rows of the batch that have met before it: {label.what} "
                    "puts several of them together, so that what the model makes of one row would "
                    "depend on the others. Preprocess each row by itself and by public constants "
                    "(the mean and the deviation of public data), make views of one record by "
                    "views= or augment=, and mix no records (mixup, cutmix)."
                )
            place = label.place(tensor.shape)
            if tensor.ndim > self._axis and tensor.shape[self._axis] == self._rows:
                first = self._order or label
                self._order = first
                if place != (self._axis, self._inner) or not (
                    _in_order(label, first) and self._complete(label)
                ):
                    raise PrivacyError(_OTHER_ORDER)
            elif label.count == 1:
                raise PrivacyError(_OTHER_ORDER)

    def unknown(self, given: Iterable[Tensor]) -> bool:
        """Whether numbers that may be made of the batch come by a way that was not followed.

        Whole numbers are left out: they are mostly words of texts, which are no tensors before.
        """
        return self.alive and any(
            t.is_floating_point()
            and t.ndim > self._axis
            and t.shape[self._axis] == self._rows
            and self.label(t) is None
            for t in given
            if self.follows
        )

    def _complete(self, label: Rows) -> bool:
        """Whether each row is there once."""
        order = label.order
        if order is None:
            return True
        rows = torch.arange(self._rows, device=order.device)
        return self._inner == 1 and len(order) == self._rows and order.sort()[0].equal(rows)

    def check(self, nodes: Iterator[Any]) -> None:
        """PrivacyError if a loss depends on what several rows have made without a gradient."""
        for node in nodes:
            name = node.metadata.get(_MARK)
            if name is not None:
                raise PrivacyError(
                    f"examples meet in the loss: {name!r} puts an output beside a number that "
                    "several rows of the batch have made, without a gradient (a mean, a threshold "
                    "or a count of the lot, rows in another order, what is left of an earlier "
                    "batch). A row's gradient would depend on the others. Make such numbers of "
                    "public ones, or of each row alone."
                )

    def hook(self, tensor: Tensor, hook: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        """A gradient hook of the loop on a tensor, whose rows its gradient has to keep."""
        label = self.label(tensor)

        def run(gradient: Tensor) -> Any:
            if isinstance(label, Rows):
                self._set(gradient, label)
            version = _version(gradient)
            with _Follows(self):
                made = hook(gradient)
            for value in (gradient, made):
                if not isinstance(value, Tensor) or (
                    value is gradient and _version(value) == version
                ):
                    continue
                found = self.label(value)
                kept = isinstance(found, Rows) and isinstance(label, Rows) and found.same(label)
                if not (kept or (found is None and isinstance(label, Summed))):
                    raise Meeting("a gradient hook that the loop has put on a tensor").refusal()
            return made

        return run


class _Follows(TorchFunctionMode):
    """Follows rows through code of the loop that runs in the backward pass."""

    def __init__(self, constants: LoopConstants) -> None:
        super().__init__()
        self._constants = constants

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        given = self._constants.before(args, kwargs or {})
        made = func(*args, **(kwargs or {}))
        self._constants.note(func, given, args, kwargs or {}, made)
        return made


_OTHER_ORDER = (
    "the model is given rows of the batch in another order than before, on another axis, or some "
    "of them for all: what it makes of one row would count for another. Give it the batch's own "
    "rows, inputs and labels in one order."
)


def _memory(tensor: Tensor) -> Any:
    """The memory that a tensor looks at, and how; None if it has none of its own."""
    try:
        place = tensor.data_ptr()
        return (place, tensor.shape, tensor.stride(), tensor.dtype) if place else None
    except (RuntimeError, NotImplementedError):
        return None


def _version(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version


def _in_order(label: Rows, other: Rows) -> bool:
    """Whether two tensors have the rows in the same order."""
    if label.order is None or other.order is None:
        return label.order is other.order
    return torch.equal(label.order.cpu(), other.order.cpu())


def _couples(name: str, given: dict[int, Label], of_loss: list[Label]) -> bool:
    """Whether rows meet in what has no gradient: the graph shows what has one."""
    if len(of_loss) == len(given) or any(isinstance(x, Meeting) for x in of_loss):
        return False
    # A sum may be added to, which changes no gradient, and its divisor is for the graph to judge.
    return not (of_loss and isinstance(of_loss[0], Summed) and name in _ADDS | _DIVIDES)


def _chooses(name: str, given: dict[int, Label], label: Label) -> bool:
    """Whether numbers of several rows say which rows are left."""
    if name not in _PICKS or not isinstance(label, Rows) or label.order is None:
        return False
    met = any(isinstance(x, Meeting) for x in given.values())
    return met and len(label.order.unique()) < label.batch


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
