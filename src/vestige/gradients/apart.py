"""Which operations of a loss keep rows apart, wherever these lie; any other is taken for a meeting.

Those that move rows, reduce an axis or multiply matrices have their layouts (layouts.py). The rest
must be known here: number by number, or each entry of the first axis by itself, or along axes that
the node names. What is not known is refused, whatever it does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

from vestige.gradients.following import pointwise
from vestige.gradients.following.table import FAMILIES
from vestige.gradients.nodes import dims, shape_of, signed

_FAMILIES = (
    *(pointwise.pointwise, pointwise.linear_pointwise, pointwise.unchanged),
    *(pointwise.multiplying, pointwise.scaling, pointwise.where, pointwise.loss),
    *(pointwise.entrywise_loss, pointwise.binary_loss),
)
BY_NUMBER = {name.replace("_", "") for name, family in FAMILIES.items() if family in _FAMILIES} | {
    *("complex", "polar", "nativedropout", "preluKernel".lower(), "rreluwithnoise"),
    *("copybackwards", "tocopy", "maskedscale", "xlog1py", "specialxlog1py", "specialentr"),
}
# Each entry of the first axis by itself, whatever the other axes are.
_LEADING = (
    *("Convolution", "MaxPool", "AvgPool", "AdaptiveAvgPool", "AdaptiveMaxPool", "Upsample"),
    *("ReflectionPad", "ReplicationPad", "GridSampler", "PixelShuffle", "PixelUnshuffle"),
    *("NativeGroupNorm", "NativeBatchNorm", "CudnnBatchNorm", "Im2Col", "ConvolutionOverrideable"),
)


class _Layout(Protocol):
    @property
    def axes(self) -> Sequence[Any]: ...

    def sizes(self) -> tuple[int, ...]: ...

    def has_rows(self, at: int) -> bool: ...


def meets(node: Any, name: str, given: Sequence[tuple[Any, _Layout | None]]) -> str | None:
    """How rows meet in a node that has no layout of its own, if they may.

    `given` are the nodes and layouts of its inputs."""
    if name.lower() in BY_NUMBER:
        return None
    with_rows = [
        layout
        for child, layout in given
        if child is not None
        and (layout is None or any(layout.has_rows(at) for at in range(len(layout.axes))))
    ]
    if not with_rows:
        return None  # numbers of one row
    over = _axes_of(node, name)
    if over is not None and None not in with_rows:
        known = [layout for layout in with_rows if layout is not None]
        if not any(at < len(one.axes) and one.has_rows(at) for one in known for at in over):
            return None
        return f"{name} goes along the axis that the rows are on"
    return (
        f"{name} is not known to keep the rows of the batch apart (compute it inside the model, "
        "where rows are followed)"
    )


def _axes_of(node: Any, name: str) -> Sequence[int] | None:
    """The axes whose numbers an operation puts together; None if that is not known."""
    out = len(shape_of(node))
    if name.startswith("Fft"):
        return dims(node)
    if name in ("NativeLayerNorm", "FusedRmsNorm", "RmsNorm"):
        return range(out - len(node._saved_normalized_shape), out)
    if name == "ConstantPadNd":
        pads = [signed(n) for n in node._saved_pad]
        pairs = list(zip(pads[::2], pads[1::2], strict=True))
        return [out - 1 - i for i, pair in enumerate(pairs) if any(pair)]
    if "Scatter" in name or name in ("IndexAdd", "IndexCopy", "IndexFill", "IndexReduce"):
        return [signed(node._saved_dim) % max(1, out)]
    if name in ("Tril", "Triu", "MatrixExp") or name.startswith("Linalg"):
        # Of matrices; determinants and singular values have fewer axes than what they are of.
        return None if name.startswith("Linalg") else (out - 2, out - 1)
    if name.startswith(_LEADING) and out >= (5 if "3D" in name else 4 if "2D" in name else 3):
        return range(1, out)
    if name == "CtcLoss":
        return (0, 2)
    return None


def written(node: Any, name: str, given: Sequence[_Layout | None], out: Sequence[int]) -> bool:
    """Whether constants alone were written into a tensor, or it is read in a line, as a view."""
    whole = given[0] is not None and math.prod(given[0].sizes()) == math.prod(out)
    if name == "CopySlices":
        return whole and not any(given[1:])
    steps = [math.prod(out[at + 1 :]) for at in range(len(out))]
    return whole and name == "AsStrided" and list(node._saved_stride) == steps
