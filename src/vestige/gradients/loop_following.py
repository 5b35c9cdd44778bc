"""How the loop's own operations move rows, where contents may be looked at.

The rules that follow rows through a model hold for any contents. Code of the loop runs once for
each batch, so that the rows which a mask picks are known by its values, as an order is.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from vestige.gradients.following import follow, keeps_places, name_of
from vestige.gradients.following.base import Result
from vestige.gradients.following.indexing import is_mask
from vestige.gradients.refs import tensors_in
from vestige.gradients.rows import Label, Meeting, Rows

_LENGTHS = {"'max'", "'amax'", "'any'"}  # of the longest row, and which columns a row has
# What takes lengths: they say how much there is of the result, and nothing of its contents.
_NEW = set("arange zeros ones empty rand randn".split())
_SIZED = _NEW | set(
    """
    new_zeros new_ones new_empty narrow expand broadcast_to
    repeat tile view reshape unflatten pad one_hot split chunk repeat_interleave
    """.split()
)
_OTHER_ROWS = Meeting("a mask of other rows")


def follow_in_loop(func: Any, labels: dict[int, Label], args: Any, kwargs: Any, out: Any) -> Result:
    """The label of what the loop's `func(*args, **kwargs)` gave, or one for each tensor in it."""
    name = name_of(func)
    if name == ".grad":  # of each row by itself, unless what it is the gradient of mixes them
        return labels[id(args[0])]
    indexes = name in ("__getitem__", "masked_select") and _are_rows(labels, args[0])
    if name in _SIZED or indexes:
        sizes = args if name in _NEW else args[1:]
        labels = _without_lengths(labels, (sizes, kwargs), name in _NEW)
    if name == "one_hot" and out.shape[-1] > 1:  # as wide as what it will meet, or it fails
        args, kwargs = args[:1], {"num_classes": out.shape[-1]}
    if not labels:
        return None
    if func is Tensor.__setitem__:
        written = _row_memory(labels, args)
        if written or _are_rows(labels, args[2]):
            return None if written else _masked(func, labels, args, kwargs, out)
    return (_masked if indexes else follow)(func, labels, args, kwargs, out)


def in_another_order(func: Any, labels: dict[int, Label], args: Any, made: Tensor) -> bool:
    """Whether rows in an order of their own are put beside constants that differ by place, such as
    weights by rank."""
    name = name_of(func)
    if not (keeps_places(func) or name in ("mul", "__mul__", "__rmul__", "div", "where")):
        return False
    label = next((x for x in labels.values() if isinstance(x, Rows)), None)
    place = label.place(made.shape) if label is not None and label.order is not None else None
    if place is None:
        return False
    back = place[0] - made.ndim
    constants = [t for t in tensors_in(args) if id(t) not in labels and not t.requires_grad]
    return any(t.ndim >= -back and t.shape[back] > 1 for t in constants)


def _are_rows(labels: dict[int, Label], value: Any) -> bool:
    return isinstance(labels.get(id(value)), Rows)


def _without_lengths(labels: dict[int, Label], sizes: Any, new: bool) -> dict[int, Label]:
    """The labels but those of lengths, and of columns that no row has, as padding beyond the
    longest. The length of one row may be that of the longest: for `new` contents."""
    lengths = set()
    for t in tensors_in(sizes):
        label = labels.get(id(t))
        longest = getattr(label, "what", None) in _LENGTHS and (not t.ndim or t.dtype == torch.bool)
        one = new and isinstance(label, Rows) and label.count == 1 and not t.ndim
        if (longest or one) and not t.is_floating_point():
            lengths.add(id(t))
    return {key: label for key, label in labels.items() if key not in lengths}


def _row_memory(labels: dict[int, Label], args: Any) -> bool:
    """Whether rows are put where each of them says, all at different places of something that had
    no rows: what is kept for every record by itself."""
    target, index, content = args
    rows = [labels.get(id(x)) for x in (index, content)]
    one_each = all(isinstance(x, Rows) and x.count > 1 for x in rows)
    if id(target) in labels or not one_each or is_mask(index) or index.ndim != 1:
        return False
    with torch._C.DisableTorchFunction():
        return len(index.unique()) == len(index)


def _masked(func: Any, labels: dict[int, Label], args: Any, kwargs: Any, out: Any) -> Result:
    """An index that begins with a mask, by the places that this picks."""
    if name_of(func) == "masked_select":
        if len(args) < 2 or args[0].shape != args[1].shape:
            return follow(func, labels, args, kwargs, out)
        func = Tensor.__getitem__
    value, index, *content = args
    parts = list(index) if isinstance(index, tuple) else [index]
    if isinstance(parts[0], np.ndarray) and parts[0].dtype == bool:
        parts[0] = torch.from_numpy(parts[0])
    mask = parts[0]
    others = any(isinstance(p, Tensor | np.ndarray | list) for p in parts[1:])
    if not is_mask(mask) or not mask.ndim or others:
        return follow(func, labels, args, kwargs, out)
    own = labels.get(id(mask))
    place = own.place(mask.shape) if isinstance(own, Rows) else None
    if own is not None and place is None:
        return follow(func, labels, args, kwargs, out)
    with torch._C.DisableTorchFunction():
        places = mask.nonzero().to(value.device).unbind(1)
        given = {key: label for key, label in labels.items() if key != id(mask)}
        label = follow(func, given, (value, (*places, *parts[1:]), *content), kwargs, out)
        if not isinstance(own, Rows) or place is None or not isinstance(label, Rows):
            return label
        owners = own.owners(mask.shape, *place, value.device)[places[place[0]]]
        picked = given[id(content[0])] if content else label
        shape = content[0].shape if content else out.shape
        return label if _belong(picked, shape, owners) else _OTHER_ROWS


def _belong(rows: Label, shape: torch.Size, owners: Tensor) -> bool:
    """Whether the first axis of such a shape has the rows in the order of `owners`."""
    if not isinstance(rows, Rows) or not len(owners):
        return not len(owners)
    if rows.count == 1:
        return rows.order is not None and bool((owners == rows.order.to(owners.device)).all())
    place = rows.place(shape)
    if place is None or place[0]:
        return False
    return torch.equal(rows.owners(shape, 0, place[1], owners.device), owners)
