"""Labels on the tensors of one forward pass: whose entries they hold, and who keeps them.

Every operation that the capture sees passes through `Tracker.follow`, also under `torch.no_grad()`:
a mean over the batch is a meeting of rows whether or not it has a gradient. A label is an attribute
of the tensor object, valid for one forward pass and one version of its contents.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version

from vestige.errors import PrivacyError
from vestige.gradients.following import follow, keeps_places, name_of
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Meeting, Rows

_LIBRARIES = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
_OWN_KEYS = frozenset(nn.Module().__dict__) | {"forward"}
_PLAIN = (bool, int, float, complex, str, bytes, type(None), nn.Module, torch.dtype, torch.device)
_PLAIN_TYPES = frozenset(t for t in _PLAIN if t is not nn.Module)
_DATA = torch.Tensor.data.__get__  # type: ignore[attr-defined]
_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
# What shares the memory of a tensor without being its view.
_ALIASES = {_DATA, torch.Tensor.detach, torch.detach}
VALUES = """
item tolist numpy __array__ __bool__ __int__ __float__ __complex__ __index__ __contains__ equal
allclose is_nonzero __dlpack__ __repr__ __format__ data_ptr storage untyped_storage
""".split()

# The labels of an operation's arguments by their identity (constants have none), and the version of
# the first, which tells afterwards whether it was written to.
Before = tuple[dict[int, Label], int | None]


class Tracker:
    """The labels of one model's forward passes."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self.parts = list(module.modules())
        self._token = 0
        self.rows = 0
        # The places of inputs without rows: they are taken for constants.
        self.shared: set[tuple[int, int]] = set()
        # Constants that belong to no module, such as a global table. A pass in which `learning` is
        # set takes any tensor that it did not make for one; later passes must meet the same object.
        self.learning = False
        self._learned = False
        self._constants: dict[int, Tensor] = {}
        # Where the forward pass asks for a yes or no about the batch, and what was answered: the
        # lines on the way there, the how-manieth time in this pass, the answer.
        self._branches: set[tuple[Any, int, bool]] = set()
        self._visits: Counter[Any] = Counter()
        self.noting = False  # while the self-check runs
        self.again = False  # while a checkpointed block runs a second time: it attributes nothing
        self.guard: Callable[[Tensor, Label | None], None] | None = None  # while a block runs
        self._top = getattr(type(module).forward, "__code__", None)
        self.checked = False  # whether the self-check has shown something
        self.registered: set[int] = set()  # parameters and buffers
        self._own: dict[int, Tensor] = {}  # the model's tensors, also in attributes
        # Each buffer, its version and its contents when it was last looked at.
        self._values: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}
        self._looked = False  # for them in this pass
        self._met: set[int] = set()  # tensors from before it
        self._written: tuple[str, str] | None = None  # the one that took values of the batch

    # -- a forward pass ---------------------------------------------------------------------

    def begin(self, rows: int, inputs: Any, axis: int, passing: set[int]) -> None:
        """A forward pass begins on `inputs`, whose tensors have `rows` rows on `axis`.

        `passing` are further parameters, which come and go."""
        self._token += 1
        self.rows, self._looked, self._written = rows, False, None
        self._met.clear()
        self._visits.clear()
        self.parts = list(self._module.modules())  # one may have been put in another's place
        stores = [s for m in self.parts for s in (m._parameters, m._buffers)]
        self.registered = {id(t) for store in stores for t in store.values() if t is not None}
        self.registered |= passing
        tensors = list(tensors_in(inputs))
        for i, tensor in enumerate(tensors):
            if tensor.ndim <= axis or tensor.shape[axis] != rows:
                self.shared.add((len(tensors), i))
            # What once had no rows is shared by all of them, also where it is as long as the batch.
            has_rows = (len(tensors), i) not in self.shared
            self.registered.discard(id(tensor))
            self.give(tensor, self.on_axis(tensor.shape, axis) if has_rows else None)

    def end(self) -> None:
        """The forward pass is over."""
        self._learned = self._learned or self.learning

    def on_axis(self, shape: Sequence[int], axis: int) -> Rows:
        """The batch's rows, in order, on an axis that has as many entries."""
        return Rows(1, self.rows).at(shape, axis, 1)

    def give(self, tensor: Tensor, label: Label | None) -> None:
        """Label a tensor; None says that it is a constant."""
        if self.guard is not None:
            self.guard(tensor, label)
        tensor._vestige = (self._token, label, tensor._version)  # type: ignore[attr-defined]

    def earlier(self, tensor: Tensor) -> Label | None:
        """The label that a tensor was given last in this pass, whatever was written to it since."""
        return tensor._vestige[1] if self._made_here(tensor) else None  # type: ignore

    def has_label(self, tensor: Tensor) -> bool:
        """Whether the tensor has a label, if only that of a constant, and is unchanged since."""
        return self._made_here(tensor) and tensor._vestige[2] == tensor._version  # type: ignore[attr-defined]

    def _made_here(self, tensor: Tensor) -> bool:
        """Whether this forward pass has made the tensor, or was given it."""
        mark = getattr(tensor, "_vestige", None)
        return mark is not None and mark[0] == self._token

    def label(self, tensor: Tensor) -> Label | None:
        """Whose entries a tensor has; None for a constant."""
        mark = getattr(tensor, "_vestige", None)
        if mark is None or mark[0] != self._token:
            return self._stranger(tensor)
        if mark[2] != tensor._version:
            return Meeting("an in-place change through another view", lost=True)
        return mark[1]  # type: ignore[no-any-return]

    def before(self, args: Any, kwargs: Any) -> Before:
        """What is to be known of an operation's arguments before it runs."""
        labels: dict[int, Label] = {}
        for value in (*args, *kwargs.values()) if kwargs else args:
            if isinstance(value, Tensor):
                # Parameters and buffers come first: they are most of what has no label.
                label = None if id(value) in self.registered else self.label(value)
                if label is not None:
                    labels[id(value)] = label
            elif isinstance(value, tuple | list | dict):
                if type(value) is tuple and value and type(value[0]) is int:
                    continue  # a stride or a padding
                for tensor in tensors_in(value):
                    label = self.label(tensor)
                    if label is not None:
                        labels[id(tensor)] = label
        version = args[0]._version if args and isinstance(args[0], Tensor) else None
        return labels, version

    def follow(
        self,
        func: Any,
        before: Before,
        args: Any,
        kwargs: Any,
        out: Any,
        ruled: bool = False,
    ) -> None:
        """Label what `func(*args, **kwargs)` gave. A rule may have labelled it already."""
        labels, version = before
        if ruled and isinstance(out, Tensor) and self.has_label(out):
            return
        if len(labels) == 1 and args and isinstance(out, Tensor) and out is not args[0]:
            label = labels.get(id(args[0]))  # the common case, without ceremony
            if isinstance(label, Rows) and keeps_places(func) and out.shape == args[0].shape:
                self.give(out, label)
                return
        if func is torch.Tensor.__setitem__:
            out = args[0]
        elif func == _SET_DATA:
            self._set_data(labels, *args)
            return
        results = [out] if isinstance(out, Tensor) else list(tensors_in(out))
        if func in _ALIASES and results:
            out._vestige_source = args[0], func == _DATA
        seen_before = isinstance(out, bool) and name_of(func) in VALUES and self.answered(out)
        if not labels:
            for tensor in results:
                if not (ruled and self.has_label(tensor)) and id(tensor) not in self.registered:
                    self.give(tensor, None)
            return
        if not results:
            if name_of(func) in VALUES and not seen_before:
                self._refuse_value(repr(name_of(func)))
            return
        if ruled and all(self.has_label(t) for t in results):
            return
        in_place = bool(args) and results[0] is args[0] and results[0]._version != version
        if in_place or "out" in kwargs:
            for tensor in results:
                self._note_written(tensor)
        made = follow(func, labels, args, kwargs, out)
        for i, tensor in enumerate(results):
            label = made[i] if isinstance(made, list) else made
            self.give(tensor, label)
        if in_place or "out" in kwargs:
            for tensor in results:
                self._spread(tensor)

    def _refuse_value(self, name: str) -> None:
        """A number that leaves the tensors steers what all rows go through. A yes or no may, in the
        directions that the self-check has taken and found to make no difference."""
        raise PrivacyError(
            f"{name} turns values of the batch into a Python value ({_site()}), where "
            "what becomes of it cannot be followed from row to row. Keep it in tensors: "
            "torch.where instead of if, a fixed length instead of lengths.max()."
        )

    def restart(self) -> None:
        """A pass of the self-check begins that nobody watches."""
        self._visits.clear()

    def answered(self, answer: bool) -> bool:
        """The forward pass asked for a yes or no: whether the self-check got the same answer at
        the same place, or has shown nothing. A second run goes the way of the first."""
        if self.again:
            return True
        lines = []
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code is not self._top:
            if not frame.f_code.co_filename.startswith(_LIBRARIES):
                lines.append((frame.f_code, frame.f_lineno))
            frame = frame.f_back
        way = (*lines, frame.f_lineno if frame is not None else 0)
        self._visits[way] += 1
        key = (way, self._visits[way], answer)
        if self.noting:
            self._branches.add(key)
        return not self.checked or key in self._branches

    def refuse_length(self, tensor: Tensor) -> None:
        """How many positions were picked by their content tells about all rows."""
        mark = getattr(tensor, "_vestige", None)
        if mark is not None and mark[0] == self._token and getattr(mark[1], "ragged", False):
            self._refuse_value(f"the shape of what {mark[1].what} gave")

    def _spread(self, target: Tensor) -> None:
        """A tensor was written in place: what it is a view of, or .data of, has changed, too."""
        label = target._vestige[1]  # type: ignore[attr-defined]
        if label is None:
            return
        source, counts_alone = getattr(target, "_vestige_source", (None, False))
        if source is not None:
            self._note_written(source)
            if counts_alone:
                increment_version(source)  # other views of it must not look untouched
            self.give(source, label)
            self._spread(source)
        base = target._base
        if base is None:
            return
        self._note_written(base)
        place = label.place(target.shape) if isinstance(label, Rows) else None
        whole: Label = Meeting("an in-place change of a part", lost=True)
        if self.rows == 1:
            whole = Rows(1, 1)
        elif isinstance(label, Rows) and place is not None:
            axis, inner = place
            for j in range(base.ndim):
                same_step = base.stride(j) == target.stride(axis)
                if same_step and base.shape[j] == target.shape[axis]:
                    whole = label.at(base.shape, j, inner)
                    break
        mark = getattr(base, "_vestige", None)
        before = mark[1] if mark is not None and mark[0] == self._token else None
        if before is not None and not (
            isinstance(before, Rows) and isinstance(whole, Rows) and before.same(whole)
        ):
            whole = before if isinstance(before, Meeting) else Meeting("an in-place change")
        self.give(base, whole)
        if hasattr(base, "_vestige_source"):
            self._spread(base)

    def _set_data(self, labels: dict[int, Label], target: Tensor, value: Any) -> None:
        """target.data = value: it has the rows that it had, or is lost."""
        before, after = labels.get(id(target)), labels.get(id(value))
        if before is None:
            if after is not None:
                self.give(target, after)
        elif not (isinstance(before, Rows) and isinstance(after, Rows) and before.same(after)):
            self.give(target, Meeting("an assignment to .data", lost=True))

    def _note_written(self, tensor: Tensor) -> None:
        """Values of the batch are written to a tensor: does it outlast the forward pass?"""
        key = id(tensor)
        if not (key in self.registered or key in self._met or key in self._own):
            return  # made by this pass, or given to it
        holders = ((type(m).__name__, key) for m, key, t in self._kept() if t is tensor)
        self._written = self._written or next(
            holders, ("the program", "a tensor outside the model")
        )

    # -- tensors from elsewhere -------------------------------------------------------------

    def _is_own(self, tensor: Tensor) -> bool:
        """Whether a tensor is the model's: a parameter, a buffer or kept in an attribute."""
        if id(tensor) not in self._own and not self._looked:
            # What an attribute holds of this pass for a while is no constant.
            self._own = {id(t): t for _, _, t in self._kept() if not self.saw(t)}
            self._looked = True
        return id(tensor) in self._own

    def _kept(self) -> Iterator[tuple[nn.Module, str, Tensor]]:
        """Every tensor that a module holds, with the name it has there."""
        for module in self.parts:
            for store in (module._parameters, module._buffers):
                for key, tensor in store.items():
                    if tensor is not None:
                        yield module, key, tensor
            for key, value in module.__dict__.items():
                if key not in _OWN_KEYS and not isinstance(value, _PLAIN):
                    for tensor in tensors_in(value):
                        yield module, key, tensor

    def _stranger(self, tensor: Tensor) -> Label | None:
        """A tensor that this pass did not make: the model's own, or a constant from elsewhere."""
        mark = getattr(tensor, "_vestige", None)
        if mark is not None and mark[1] is not None:
            return Meeting("values that were kept from an earlier batch")
        self._met.add(id(tensor))
        if self._is_own(tensor) or id(tensor) in self._constants:
            return None
        base = tensor._base
        if base is not None and (self._is_own(base) or id(base) in self._constants):
            return None
        if self.learning and not tensor.requires_grad:
            self._constants[id(tensor)] = tensor
            return None
        if self._learned or tensor.grad_fn is not None:
            return Meeting("an operation or a tensor from outside the model's forward", lost=True)
        return None

    def check_buffers(self) -> None:
        """Refuse a buffer whose contents changed although torch knows of no change: it was written
        through .data. Called once an epoch, and before the engine writes anything down."""
        for module in self.parts:
            for key, tensor in module._buffers.items():
                if tensor is None:
                    continue
                before = self._values.get((id(module), key))
                if before is not None and before[0] is tensor and before[1] == tensor._version:
                    if not same_contents(tensor, before[2]):
                        raise kept_by_forward(type(module).__name__, key)
                else:
                    copy = tensor.detach().clone()
                    self._values[id(module), key] = (tensor, tensor._version, copy)

    def check_kept(self) -> None:
        """Refuse a model that keeps what it saw of the batch: in a buffer (also through .data), in
        an attribute, or in its extra state."""
        if self._written is not None:
            raise kept_by_forward(*self._written)
        for module in self.parts:
            for key, value in module.__dict__.items():
                kind = type(value)
                if kind in _PLAIN_TYPES or key in _OWN_KEYS:
                    continue
                if kind is tuple and not any(type(v) not in _PLAIN_TYPES for v in value):
                    continue
                if not isinstance(value, nn.Module) and any(map(self.saw, tensors_in(value))):
                    raise kept_by_forward(type(module).__name__, key)
        plain = nn.Module.get_extra_state
        for module in (m for m in self.parts if type(m).get_extra_state is not plain):
            if any(self.saw(t) for t in tensors_in(module.get_extra_state())):
                raise kept_by_forward(type(module).__name__, "get_extra_state()")

    def saw(self, tensor: Tensor) -> bool:
        mark = getattr(tensor, "_vestige", None)
        return mark is not None and mark[0] == self._token and mark[1] is not None


def same_contents(value: Tensor, before: Tensor) -> bool:
    """Equal, where what is not a number equals itself."""
    if value.shape != before.shape or value.dtype != before.dtype:
        return False
    if torch.equal(value, before):
        return True
    return bool(torch.isclose(value, before, rtol=0, atol=0, equal_nan=True).all())


def _site() -> str:
    """The line of the model's code that is running."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def kept_by_forward(owner: str, key: str) -> PrivacyError:
    """The error for a module that keeps tensors of the batch."""
    return PrivacyError(
        f"{key!r} of {owner} was changed by the forward pass: it keeps values of the batch. "
        "Statistics of private batches are an unprotected release, and a checkpoint may hold "
        "them: use vestige.fix(model) for batch norm, turn the tracking off, or move it out of "
        "the model."
    )
