"""How torch's operations move the rows of the batch: the label of a result from its arguments.

Each function below covers a family of operations (pointwise, along an axis, moving entries,
products) by name. An operation that no family names gives a result whose rows are lost; it is
refused where a parameter or the loss would meet it.

Guarantee: a result is labelled `Rows` only if each of its entries depends on the one row that the
label says, for any contents. (What the position in the lot does to an entry, such as a constant
that differs from row to row, no label tells: the self-check compares rows with rows alone.)
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch.nn.functional as F
from torch._ops import OpOverload, OpOverloadPacket

from vestige.gradients.following import moving, pointwise
from vestige.gradients.following.base import SUMMED, Call, Family, Lost, Meet, Result, agreed
from vestige.gradients.following.table import FAMILIES, LENDING_SHAPE, RAGGED
from vestige.gradients.rows import Label, Meeting, Rows, Summed

__all__ = ["FAMILIES", "follow", "keeps_places", "name_of"]


_OF_SINGLE_ROWS = (
    *(pointwise.like, moving.joined, moving.stacked, moving.one_below_the_other),
    *(moving.constructed, moving.lent, moving.padded_together),
)


def follow(
    func: Any,
    labels: Mapping[int, Label],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    out: Any,
) -> Result:
    """The label of what `func(*args, **kwargs)` gave, or one for each tensor in it.

    `labels` has those of the arguments, by their identity, at least one.
    """
    if not args and "input" in kwargs:
        args, kwargs = (kwargs["input"],), {k: v for k, v in kwargs.items() if k != "input"}
    family, name = _family(func), name_of(func)
    try:
        ones = [x for x in labels.values() if isinstance(x, Rows) and x.count == 1]
        if ones and family not in _OF_SINGLE_ROWS:
            # Whatever is made of one row belongs to it; with others it makes a meeting.
            if len(ones) < len(labels):
                raise Meet
            return agreed(ones)
        if family is None:
            raise Lost
        call = Call(labels, args, kwargs, out)
        label = family(call)
        if call.unseen and name not in LENDING_SHAPE:  # a length or a place that rows have given
            raise Lost
        return Summed(repr(name)) if label is SUMMED else label
    except (Lost, LookupError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        why = f" ({error})" if isinstance(error, Lost) and error.args else ""
        meeting = Meeting(f"{name!r}{why}", lost=True)
    except Meet:
        meeting = Meeting(repr(name))
    ragged = name in RAGGED or any(getattr(x, "ragged", False) for x in labels.values())
    return replace(_carried_on(labels.values()) or meeting, ragged=ragged)


_known: dict[Any, Family | None] = {}  # families by function: names are looked up once


def _family(func: Any) -> Family | None:
    if func not in _known:
        _known[func] = FAMILIES.get(name_of(func)) if _is_torchs(func) else None
    return _known[func]


def _is_torchs(func: Any) -> bool:
    """Whether an operation is torch's own. Methods and properties name no module."""
    module = getattr(func, "__module__", None)
    return module is None or module.partition(".")[0] == "torch"


def keeps_places(func: Any) -> bool:
    """Whether an operation is pointwise, so that one argument's rows are those of the result."""
    family = _family(func)
    return family is pointwise.pointwise or family is pointwise.linear_pointwise


def name_of(func: Any) -> str:
    """The name of an operation, of the property that is read, or of an overload without its end.

    An operation of somebody's library is not torch's of the same name.
    """
    if func is F.unfold:  # Tensor.unfold is another operation
        return "im2col"
    name = getattr(func, "__name__", str(func))
    if name == "__get__":
        return f".{func.__self__.__name__}"
    if isinstance(func, OpOverload | OpOverloadPacket):
        packet = func.overloadpacket if isinstance(func, OpOverload) else func
        return str(packet).removeprefix("aten.")
    return name


def _carried_on(labels: Iterable[Label]) -> Meeting | None:
    """A meeting among the arguments says more than the operation after it."""
    meetings = [x for x in labels if isinstance(x, Meeting)]
    meetings += [Meeting(x.what) for x in labels if isinstance(x, Summed)]
    return next((m for m in meetings if not m.lost), meetings[0] if meetings else None)
