"""Which row every number of a tensor in the loss belongs to, from the model's outputs on.

Views, slices and transposes move rows in a way that sizes alone do not show: 16 rows may be an axis
of 16, two axes of 4 and 4, or every second place of an axis of 32. A layout says it exactly. The
row of the number at (i, j, ...) is `first` plus a step times a digit for every factor of an axis,
as strides do for memory; a factor whose step is zero holds no rows. Orders that no steps describe
(a permutation, a roll) get steps that no rows have, the same for the same order.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from vestige.gradients.apart import meets, written
from vestige.gradients.nodes import (
    KEEPS,
    OVER_AN_AXIS,
    SIDE_BY_SIDE,
    dims,
    is_leaf,
    name_of,
    reduction,
    row_axis,
    signed,
)

Axis = tuple[tuple[int, int], ...]  # factors (size, step), the outermost first

_RESHAPES = {"View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"}
_SLICES = {"Slice", "Select", "Split", "SplitWithSizes", "Unbind"}
_WRITES = {"CopySlices", "AsStrided", "IndexPut", "MaskedScatter"}
_LAST_TWO = {"Mm": 0, "Bmm": 0, "Mv": 0, "Dot": 0, "Addmm": 1, "Baddbmm": 1, "Addmv": 1}
_COMPETE = OVER_AN_AXIS | {"Sort", "Topk"}
# Operations whose layouts are made here.
_FOLLOWED = (KEEPS | _RESHAPES | {"NllLoss", "NllLoss2D"}) - {"ConstantPadNd", "Diagonal"}


@dataclass(frozen=True)
class Layout:
    """The rows of a tensor's numbers."""

    first: int
    axes: tuple[Axis, ...]

    def sizes(self) -> tuple[int, ...]:
        """The shape of the tensor."""
        return tuple(math.prod(size for size, _ in axis) for axis in self.axes)

    def has_rows(self, at: int) -> bool:
        """Whether several rows lie along an axis."""
        return any(step for _, step in self.axes[at])

    def put(self, at: int, *axes: Axis, first: int = 0) -> Layout:
        """With other axes in the place of one."""
        around = (*self.axes[:at], *axes, *self.axes[at + 1 :])
        return Layout(self.first + first, tuple(_short(axis) for axis in around))


class Layouts:
    """The layouts of what the nodes of a loss have made; None where nothing is known.

    `inside` tells the model's own nodes, whose outputs have `rows` rows along `axis`.

    Guarantee: a meeting that is told is one. What is `unclear` may be one: an operation that is not
    known, or that is given rows whose places are not.
    """

    def __init__(self, rows: int, axis: int, inside: Callable[[Any], bool]) -> None:
        self._rows, self._axis, self._inside = rows, axis, inside
        self._known: dict[tuple[Any, int], Layout | None] = {}  # holds the nodes
        self.unclear: str | None = None  # how rows may meet in a node that `meeting` was asked of

    def of(self, node: Any, output: int) -> Layout | None:
        """The layout of an output of a node."""
        todo = [(node, output)]
        while todo:
            node, output = key = todo[-1]
            ends = self._inside(node) or is_leaf(node)
            below = [] if ends else [(n, i) for n, i in node.next_functions if n]
            missing = [k for k in below if k not in self._known]
            if key not in self._known and missing:
                todo += missing
                continue
            todo.pop()
            if key not in self._known:
                kept = node.next_functions if name_of(node) in _LAST_TWO else below
                given = [self._known.get(k) for k in kept]
                self._known[key] = self._start(*key) if ends else _made(node, output, given)
        return self._known[key]

    def _start(self, node: Any, output: int) -> Layout | None:
        sizes = [] if is_leaf(node) else node._input_metadata[output].shape
        at = row_axis(sizes, self._axis)
        if not len(sizes) or sizes[at] != self._rows:
            return None
        steps = [1 if i == at else 0 for i in range(len(sizes))]
        return Layout(0, tuple(_short([pair]) for pair in zip(sizes, steps, strict=True)))

    def meeting(self, node: Any) -> str | None:
        """How rows meet in a node, if they are seen to."""
        name = name_of(node)
        inputs = [self.of(child, i) if child else None for child, i in node.next_functions]
        known = [layout for layout in inputs if layout is not None]
        if name in _LAST_TWO:
            if _contracts(*inputs[_LAST_TWO[name] :][:2]):
                return f"a product of outputs ({name}) goes over rows or compares them"
        elif name in _COMPETE and known:
            over = dims(node) or range(len(known[0].axes))
            if any(known[0].has_rows(at) for at in over):
                shape = known[0].sizes()
                return f"{name} goes over rows that lie along the axes of {shape}, and more follows"
        elif name not in SIDE_BY_SIDE | _WRITES and "Scatter" not in name and _differ(known):
            return f"{name} puts different rows together (slices, or orders, of the batch)"
        elif (name not in _FOLLOWED | _WRITES and not reduction(node)) or self._lost(node, name):
            below = [None if not n or is_leaf(n) else n for n, _ in node.next_functions]
            self.unclear = self.unclear or meets(node, name, list(zip(below, inputs, strict=True)))
        return None

    def _lost(self, node: Any, name: str) -> bool:
        return name in _WRITES and self.of(node, 0) is None


def _made(node: Any, output: int, given: Sequence[Layout | None]) -> Layout | None:
    """What an operation makes of the layouts that it is given."""
    name = name_of(node)
    out = tuple(node._input_metadata[output].shape)
    known = [layout for layout in given if layout is not None]
    if not known or 0 in out or (name in _WRITES and not written(node, name, given, out)):
        return None
    one = known[0]
    if name in _WRITES | _RESHAPES:
        return _reshaped(one, out)
    if name in ("Transpose", "T", "Permute"):
        return _turned(node, name, one)
    if name in _SLICES:
        return _sliced(node, name, output, one, out)
    if name in ("Flip", "Roll", "Index", "IndexSelect", "Gather"):
        return _ordered(node, name, one, out)
    if name in ("Stack", "Cat"):
        return _joined(name, signed(node._saved_dim) % len(out), given, out)
    if name in ("Repeat", "Unfold"):
        return _repeated(node, name, one, out)
    if name in _LAST_TWO:
        pair = given[_LAST_TWO[name] :]
        if len(known) > 1 and (len(pair) != len(given) or _contracts(*pair)):
            return None
        return _product(pair, out)
    if name in ("NllLoss", "NllLoss2D") and len(one.axes) == len(out) + 1 > 1:
        return None if one.has_rows(1) else Layout(one.first, one.axes[:1] + one.axes[2:])
    if name in _COMPETE:
        return _reduced(node, one, out)
    return None if _differ(known) else _spread(one, out)


def _short(axis: Sequence[tuple[int, int]]) -> Axis:
    """One way to write an axis: no factors of one, none that go on as the next one does."""
    short: list[tuple[int, int]] = []
    for size, step in axis:
        if size == 1:
            continue
        if short and short[-1][1] == size * step:
            short[-1] = (short[-1][0] * size, step)
        else:
            short.append((size, step))
    return tuple(short)


def _order(*of: Any) -> int:
    """A step that no rows have, for an order that no steps describe."""
    return 2**64 + hash(of)


def _reshaped(one: Layout, out: Sequence[int]) -> Layout:
    """Row-major, factor by factor; rows that are cut across lie along all axes that are left."""
    left = list(_short([factor for axis in one.axes for factor in axis]))
    axes: list[Axis] = []
    for at, size in enumerate(out):
        axis, need = [], size
        while need > 1:
            have, step = left.pop(0)
            if need % have == 0:
                axis.append((have, step))
                need //= have
            elif have % need == 0:
                axis.append((need, step * (have // need)))
                left.insert(0, (have // need, step))
                need = 1
            else:
                cut = _order(one, tuple(out))
                axes += [((n, cut + i),) for i, n in enumerate(out[at:])]
                return Layout(one.first, tuple(_short(axis) for axis in axes))
        axes.append(_short(axis))
    return Layout(one.first, tuple(axes))


def _turned(node: Any, name: str, one: Layout) -> Layout:
    places = list(range(len(one.axes)))
    if name == "Permute":
        places = [signed(d) % len(places) for d in node._saved_dims]
    elif name == "T":
        places.reverse()
    else:
        a, b = (signed(d) % len(places) for d in (node._saved_dim0, node._saved_dim1))
        places[a], places[b] = b, a
    return Layout(one.first, tuple(one.axes[i] for i in places))


def _sliced(node: Any, name: str, output: int, one: Layout, out: Sequence[int]) -> Layout:
    at = signed(node._saved_dim) % len(one.axes)
    size = one.sizes()[at]
    step, length = 1, 1 if name in ("Select", "Unbind") else out[at]
    if name == "Slice":
        start = max(0, signed(node._saved_start) + (size if signed(node._saved_start) < 0 else 0))
        step = node._saved_step
    elif name == "Select":
        start = signed(node._saved_index) % size
    elif name == "Split":
        start = output * node._saved_split_size
    else:
        start = output if name == "Unbind" else sum(node._saved_split_sizes[:output])
    first, axis = _part(one.axes[at], start, step, length)
    return one.put(at, *([] if name in ("Select", "Unbind") else [axis]), first=first)


def _part(axis: Axis, start: int, step: int, length: int) -> tuple[int, Axis]:
    """The row that a slice of an axis starts with, and its factors."""
    if not axis:
        return 0, ((length, 0),)
    (_, outer), *rest = axis
    within = math.prod(size for size, _ in rest)
    if within == 1:
        return start * outer, ((length, outer * step),)
    if length == 1 or (step == 1 and start // within == (start + length - 1) // within):
        first, inner = _part(tuple(rest), start % within, step, length)
        return first + start // within * outer, inner
    if step == 1 and start % within == length % within == 0:
        return start // within * outer, ((length // within, outer), *rest)
    return 0, ((length, _order(axis, start, step)),)


def _ordered(node: Any, name: str, one: Layout, out: Sequence[int]) -> Layout | None:
    """What takes numbers along an axis in an order of its own."""
    if name in ("Flip", "Roll"):
        moved = [signed(d) % len(one.axes) for d in node._saved_dims]
        how: Any = getattr(node, "_saved_shifts", None)
        if not moved:  # a roll of all numbers in one line
            return Layout(one.first + _order(name, how), one.axes)
        for at in moved:
            if one.has_rows(at):
                one = one.put(at, one.axes[at], first=_order(name, how, at))
        return one
    if name == "Index":
        by = [(at, i) for at, i in enumerate(node._saved_indices) if i is not None]
        if len(by) != 1 or by[0][1].dtype in (torch.bool, torch.uint8):
            return _picked(by, one, out)
        at, index = by[0]
    else:
        at, index = signed(node._saved_dim) % len(one.axes), node._saved_index
    places = index.ndim if name == "Index" else 1
    step = _order(index.data_ptr(), index._version, tuple(index.shape)) if one.has_rows(at) else 0
    taken = one.put(at, *(((n, step * (i + 1)),) for i, n in enumerate(out[at : at + places])))
    return taken if taken.sizes() == tuple(out) else None


def _picked(
    by: Sequence[tuple[int, torch.Tensor]], one: Layout, out: Sequence[int]
) -> Layout | None:
    """What several indices take, or a mask: rows in an order that is known of `arange` alone."""
    first, index = by[0]
    mask = index.dtype in (torch.bool, torch.uint8)
    gone = index.ndim if mask else len(by)
    if [at for at, _ in by] != list(range(first, first + (1 if mask else gone))):
        return None
    new = range(first, first + len(out) - len(one.axes) + gone)
    over = [at for at in range(first, first + gone) if one.has_rows(at)]
    order = _order("picked", tuple(out)) if over else 0
    axes: list[Axis] = [((out[at], order and order + at),) for at in new]
    plain = not mask and len(over) == len(new) == len(one.axes[over[0]]) == 1
    if plain and dict(by)[over[0]].flatten().tolist() == list(range(out[first])):
        axes = [((out[first], one.axes[over[0]][0][1]),)]
    whole = (*one.axes[:first], *axes, *one.axes[first + gone :])
    taken = Layout(one.first, tuple(map(_short, whole)))
    return taken if taken.sizes() == tuple(out) else None


def _joined(
    name: str, at: int, given: Sequence[Layout | None], out: Sequence[int]
) -> Layout | None:
    """Pieces side by side: rows that follow each other are an axis again."""
    pieces = [one for one in given if one is not None]
    if len(pieces) != len(given) or any(p.sizes() == (0,) for p in pieces):
        return None
    if name == "Stack":
        pieces = [Layout(p.first, (*p.axes[:at], (), *p.axes[at:])) for p in pieces]
    axes = [p.axes[at] for p in pieces]
    if len({p.put(at, ()).axes for p in pieces}) > 1:
        return None
    starts, step = [p.first for p in pieces], pieces[-1].first - pieces[0].first
    lengths = [p.sizes()[at] for p in pieces]
    before = sum(lengths[:-1])
    step = step // before if before else 0
    follow = all(s == starts[0] + step * sum(lengths[:i]) for i, s in enumerate(starts))
    if not follow or any(
        axis not in ((), ((n, step),)) for axis, n in zip(axes, lengths, strict=True)
    ):
        step = _order(tuple(starts), tuple(axes))
    return pieces[0].put(at, ((out[at], step),))


def _repeated(node: Any, name: str, one: Layout, out: Sequence[int]) -> Layout | None:
    if name == "Repeat":
        axes = ((),) * (len(out) - len(one.axes)) + one.axes
        times = node._saved_repeats
        return Layout(
            one.first, tuple(_short([(n, 0), *a]) for n, a in zip(times, axes, strict=True))
        )
    at = signed(node._saved_dimension) % len(one.axes)
    axis = one.axes[at]
    if len(axis) > 1:
        return None
    step = axis[0][1] if axis else 0
    moved = one.put(at, ((out[at], step * node._saved_step),))
    return Layout(moved.first, (*moved.axes, _short([(out[-1], step)])))


def _product(given: Sequence[Layout | None], out: Sequence[int]) -> Layout | None:
    """A product with a constant."""
    left, right = given[0], given[1] if len(given) > 1 else None
    if _contracts(left, right) or not out:
        return None
    if left is not None:
        gone = left.put(len(left.axes) - 1, *([((out[-1], 0),)] * (len(out) == len(left.axes))))
        return gone if gone.sizes() == tuple(out) else None
    if right is not None and len(right.axes) == len(out) > 1:
        return right.put(len(out) - 2, ((out[-2], 0),))
    return None


def _contracts(left: Layout | None = None, right: Layout | None = None) -> bool:
    """Whether a matrix product sums over rows, or pairs those of one side with the other's."""
    if left is not None and left.has_rows(-1):
        return True
    if right is not None and right.has_rows(-2 if len(right.axes) > 1 else -1):
        return True
    if left is None or right is None:
        return False
    pairs = [
        one.first if not any(one.has_rows(at) for at in range(-min(2, len(one.axes)), 0)) else None
        for one in (left, right)
    ]
    return None in pairs or pairs[0] != pairs[1] or left.axes[:-2] != right.axes[:-2]


def _reduced(node: Any, one: Layout, out: Sequence[int]) -> Layout | None:
    over = dims(node) or tuple(range(len(one.axes)))
    if any(one.has_rows(at) for at in over):
        return None
    if len(out) == len(one.axes):
        return _spread(
            Layout(
                one.first,
                tuple(
                    _short([(out[at], 0)]) if at in over else axis
                    for at, axis in enumerate(one.axes)
                ),
            ),
            out,
        )
    return Layout(one.first, tuple(a for at, a in enumerate(one.axes) if at not in over))


def _spread(one: Layout, out: Sequence[int]) -> Layout | None:
    """Along axes that were not there, or that have no rows and another length."""
    if len(one.axes) > len(out):
        return None
    axes = ((),) * (len(out) - len(one.axes)) + one.axes
    now = Layout(
        one.first,
        tuple(
            axis if any(step for _, step in axis) else _short([(n, 0)])
            for axis, n in zip(axes, out, strict=True)
        ),
    )
    return now if now.sizes() == tuple(out) else None


def _differ(known: Sequence[Layout]) -> bool:
    """Whether tensors that are taken number by number have different rows in a place."""
    if len(known) < 2:
        return False
    try:
        out = torch.broadcast_shapes(*(one.sizes() for one in known))
    except RuntimeError:
        return False
    return len({_spread(one, out) for one in known} - {None}) > 1
