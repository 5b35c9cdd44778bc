"""What the nodes of an autograd graph tell: names, shapes and what they have saved."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

# What keeps numbers as they are, moves them, adds them up or takes some out.
KEEPS = {
    *("Add", "Sub", "Rsub", "Neg", "View", "UnsafeView", "ReshapeAlias", "Squeeze", "Unsqueeze"),
    *("Expand", "Clone", "ToCopy", "CopyBackwards", "Alias", "Stack", "Cat", "Select", "Slice"),
    *("Transpose", "T", "Permute", "Split", "SplitWithSizes", "Unbind", "Repeat", "MaskedFill"),
    *("Where", "AsStrided", "CopySlices", "Index", "IndexSelect", "MaskedSelect", "Gather"),
    *("ConstantPadNd", "Narrow", "Unfold", "Diagonal", "Flip", "Roll"),
}
# A model's own loss is followed through these; anything else is the model, whose rows are followed
# by the capture.
OF_A_LOSS = KEEPS | {"LogSoftmax", "Softmax", "Mul", "Div", "NllLoss", "NllLoss2D", "Sum", "Mean"}
PICKS_ROWS = {"Select", "Slice", "Split", "SplitWithSizes", "Unbind"}
SIDE_BY_SIDE = {"Stack", "Cat", "CopySlices"}
SPREADS = {"Add", "Sub", "Rsub", "Mul", "Div", "Where", "Expand", "Pow", "Maximum", "Minimum"}
# Inputs that are compared row by row, if both come from the model.
PRODUCTS: dict[str, tuple[int, ...]] = {
    **{"Mm": (0, 1), "Mv": (0, 1), "Dot": (0, 1), "Addmm": (1, 2)},
    **{"Cdist": (0, 1), "EuclideanDist": (0, 1), "Pdist": (0,)},
}
# Over the axis of the rows these make one number of many rows, or let rows compete.
OVER_AN_AXIS = {
    *("Sum", "Nansum", "Mean", "Prod", "Var", "VarMean", "Std", "StdMean", "Norm", "Median"),
    *("LinalgVectorNorm", "Amax", "Amin", "Aminmax", "Max", "Min", "Nanmedian", "Kthvalue"),
    *("Softmax", "LogSoftmax", "Logsumexp", "Logcumsumexp", "Cumsum", "Cumprod", "Cummax"),
    *("Cummin", "Mode"),
}


def children(node: Any) -> list[Any]:
    """The nodes that a node hands its gradients on to."""
    return [child for child, _ in node.next_functions if child]


def below(nodes: Sequence[Any], through: Callable[[Any], bool]) -> Iterator[Any]:
    """These nodes and what is below them, as long as the way goes through nodes of a kind."""
    todo = [node for node in nodes if node]
    seen: set[Any] = set()  # holds the nodes, so that they stay themselves
    while todo:
        node = todo.pop()
        if node not in seen:
            seen.add(node)
            yield node
            if through(node):
                todo += children(node)


def multiply(node: Any, factor: Tensor) -> None:
    """Multiply the gradient that enters a node, once for all."""
    if node.metadata.setdefault("vestige factor", factor) is factor:
        node.register_prehook(lambda g: (None if g[0] is None else g[0] * factor.to(g[0]),))


_NAMES: dict[type, str] = {}  # torch spells a node's name out anew each time it is asked


def name_of(node: Any) -> str:
    """`Mean` for MeanBackward0, and so on."""
    kind = type(node)
    known = _NAMES.get(kind)
    if known is not None:
        return known
    if isinstance(node, BackwardCFunction):
        return kind.__name__  # its attributes are the author's, `name` as well
    name = str(node.name()).rsplit("::", 1)[-1]
    short = name.rstrip("0123456789").removesuffix("Backward")
    if kind.__name__ == name:  # else torch has one type for several operations
        _NAMES[kind] = short
    return short


def is_leaf(node: Any) -> bool:
    """Whether a node is where a gradient ends, in the tensor `node.variable`."""
    return type(node).__name__ == "AccumulateGrad"


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of what the node's operation made."""
    return tuple(node._input_metadata[0].shape)


def input_sizes(node: Any) -> tuple[int, ...]:
    """The shape that an operation was given."""
    sizes = getattr(node, "_saved_self_sym_sizes", None)
    if sizes is None:
        value = getattr(node, "_saved_self", None)
        sizes = shape_of(node) if value is None else value.shape
    return tuple(sizes)


def dims(node: Any) -> tuple[int, ...]:
    """The axes that an operation goes over; none where it goes over all."""
    dims = getattr(node, "_saved_dim", None)
    if dims is None:
        return ()
    sizes = input_sizes(node)
    given = dims if isinstance(dims, tuple | list) else (dims,)
    return tuple(signed(d) % max(1, len(sizes)) for d in given)


def signed(number: int) -> int:
    """Nodes show a negative axis as an unsigned number."""
    return number - 2**64 if number >= 2**63 else number


def reduction(node: Any) -> int:
    """0 where an operation does not reduce, 1 for a mean, 2 for a sum."""
    return int(getattr(node, "_saved_reduction", 0))


def is_number(value: Tensor) -> bool:
    """Whether a saved constant was a Python number, which does not decide the type of a result."""
    if value.ndim or value.dtype not in (torch.int64, torch.float64):
        return False
    small = torch.float16 if value.is_floating_point() else torch.int8
    return torch.result_type(value, torch.zeros((), dtype=small)) == small


def is_multiple(value: float, rows: int) -> bool:
    """Whether a number is the rows or a whole multiple of them."""
    times = value / rows
    return times > 0.5 and abs(times - round(times)) <= 1e-6 * times


def linear_below(node: Any) -> Iterator[Any]:
    """What is added up and scaled to what a node is given."""
    return below(children(node), lambda n: name_of(n) in KEEPS or name_of(n) in ("Mul", "Div"))


def factor(node: Any) -> float | None:
    """The number that a product or a quotient multiplies by; None where it is no constant."""
    name, edges = name_of(node), [bool(child) for child, _ in node.next_functions]
    both = len(edges) > 1 and all(edges)
    if name not in ("Mul", "Div") or both or (name == "Div" and not edges[0]):
        return None
    other = node._saved_other if edges[0] else node._saved_self
    if isinstance(other, Tensor) and not is_number(other):
        return None
    value = abs(float(other))
    return value if name == "Mul" else 1 / value if value else math.inf


def factors_below(node: Any, stop: Callable[[Any], bool]) -> Iterator[float]:
    """The constants that all a node is given was multiplied by, until there is more to it."""
    while len(only := children(node)) == 1 and not stop(node := only[0]):
        number = factor(node)
        if number is not None:
            yield number
        elif name_of(node) not in ("Neg", "View", "Squeeze", "Unsqueeze", "ToCopy", "Clone"):
            return


def row_axis(sizes: Sequence[int], axis: int) -> int:
    """Where a tensor of these sizes has the rows, if it has them: two axes may be rows and one."""
    return axis if len(sizes) > axis + 1 else 0


def row_taken(node: Any, output: int, rows: int, axis: int) -> int | None:
    """The row that an output of a node takes out of all of them, if that is what it does."""
    name = name_of(node)
    if name not in PICKS_ROWS:
        return None
    if name in ("Unbind", "Split", "SplitWithSizes"):  # an output for every row
        every = len(node._input_metadata) == rows and node._saved_dim in (0, axis)
        return output if every else None
    sizes, out = input_sizes(node), shape_of(node)
    axis = row_axis(sizes, axis)
    if not sizes or sizes[axis] != rows or axis not in dims(node):
        return None
    if name == "Slice" and out[axis] != 1:
        return None
    return signed(node._saved_index if name == "Select" else node._saved_start) % rows


def summed(node: Any) -> int | None:
    """How many numbers the sums right below a node add up; None where there is no sum."""
    count: int | None = None
    while True:
        only = children(node)
        if len(only) != 1:
            return count
        node = only[0]
        name = name_of(node)
        if name == "Sum":
            count = math.prod(input_sizes(node))
        elif reduction(node) == 2:
            counted = node._saved_target if name.startswith("NllLoss") else node._saved_self
            return int(counted.numel())
        elif name not in ("Neg", "View", "Squeeze", "Unsqueeze", "ToCopy", "Clone"):
            return count
