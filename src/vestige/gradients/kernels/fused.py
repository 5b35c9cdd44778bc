"""Launches the Triton programs: which tiles, how many records a program takes, what is masked.

The choices depend on shapes alone, never on the numbers, and the results on no order of execution.
Only a CUDA device with Triton runs them; elsewhere `covers` is false and importing costs nothing.
"""

from __future__ import annotations

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vestige.gradients.kernels.bounds import DEEPEST

CHUNK_POSITIONS = 1024  # summed by tensor cores in one go; longer sequences add up such sums
POSITIONS_IN_BLOCK, COLUMNS_IN_BLOCK = 16, 256  # of `term_sums`


class Tiling(NamedTuple):
    """The tile of a program, and how it is run."""

    p: int
    d: int
    t: int
    warps: int
    stages: int


def covers(a: Tensor, g: Tensor) -> bool:
    """Whether the programs take these factors: bf16 or float32 on a CUDA device, with positions."""
    return (
        a.is_cuda
        and a.ndim == 3
        and a.dtype == g.dtype
        and a.dtype in (torch.bfloat16, torch.float32)
        and 1 < a.shape[1] <= DEEPEST
        and min(*a.shape, *g.shape) > 0
        and _precision(a) is not None
        and available()
    )


@cache
def available() -> bool:
    """Whether Triton is installed and a device has the tensor cores that it needs."""
    found = find_spec("triton") is not None and torch.cuda.is_available()
    return found and torch.cuda.get_device_capability() >= (8, 0)


def square_norms(a: Tensor, g: Tensor, tiling: Tiling | None = None) -> Tensor:
    """Certified squared norms, (n,), in float64: no number of a product leaves the registers."""
    n, t, d = a.shape
    p = g.shape[2]
    tiling = tiling or norm_tiling(t, p, d, a.dtype)
    programs = _programs()
    blocks = -(-t // POSITIONS_IN_BLOCK)
    partial = a.new_empty((n, blocks, 3), dtype=torch.float64)
    programs.term_sums[(n, blocks)](
        a, g, partial, t, d, p, *a.stride(), *g.stride(),
        BLOCK_T=POSITIONS_IN_BLOCK, BLOCK=COLUMNS_IN_BLOCK,
    )  # fmt: skip
    tiles = -(-p // tiling.p) * -(-d // tiling.d)
    # Short records one after the other in one program: the next one loads while this one ends.
    records = max(1, min(n, 16 * tiling.t // t, n * tiles // 1024))
    squares = a.new_empty((n, tiles), dtype=torch.float32)
    programs.tile_squares[(tiles * -(-n // records),)](
        a, g, squares, n, t, d, p, *a.stride(), *g.stride(),
        RECORDS=records, LONG=t > CHUNK_POSITIONS, **_options(a, g, tiling),
    )  # fmt: skip
    out = a.new_empty(n, dtype=torch.float64)
    summed = tiling.p + tiling.d
    programs.certify[(n,)](
        partial, squares, out, blocks, tiles, t, d, p, depth(t, tiling), summed, BLOCK=256
    )
    return out


def add_weighted(
    a: Tensor, g: Tensor, factors: Tensor, total: Tensor, tiling: Tiling | None = None
) -> None:
    """Add sum_i factors[i] G_i to `total` (p, d), factors in float32 on float32 products."""
    n, t, d = a.shape
    p = g.shape[2]
    tiling = tiling or sum_tiling(t, p, d, a.dtype)
    tiles = -(-p // tiling.p) * -(-d // tiling.d)
    # A small weight has too few tiles for the device: parts of the records, added up in order.
    processors = torch.cuda.get_device_properties(a.device).multi_processor_count
    records = -(-n // max(1, min(n, processors // tiles)))
    parts = -(-n // records)
    direct = parts == 1 and total.dtype == torch.float32 and total.stride(-1) == 1
    out = total.unsqueeze(0) if direct else a.new_empty((parts, p, d), dtype=torch.float32)
    _programs().weighted_tiles[(tiles * parts,)](
        a, g, factors.float(), out, n, t, d, p, *a.stride(), *g.stride(),
        out.stride(0), out.stride(1), records, ADD=direct, **_options(a, g, tiling),
    )  # fmt: skip
    if not direct:
        total.add_(out.sum(0))


def depth(t: int, tiling: Tiling) -> int:
    """The longest chain of additions on the way of one product into the sum over positions."""
    chunk = max(1, CHUNK_POSITIONS // tiling.t) * tiling.t
    return t if t <= chunk else chunk + -(-t // chunk)


def norm_tiling(t: int, p: int, d: int, dtype: torch.dtype) -> Tiling:
    """The tile of `square_norms`: large, because it is all that the registers hold."""
    if dtype == torch.float32:
        return Tiling(_side(p, 128), _side(d, 128), 32, 8, 3)
    if t > CHUNK_POSITIONS:
        return Tiling(_side(p, 128), _side(d, 128), 64, 8, 3)
    return Tiling(_side(p, 128), _side(d, 256), _side(t, 64), 8, 3)


def sum_tiling(t: int, p: int, d: int, dtype: torch.dtype) -> Tiling:
    """The tile of `add_weighted`: a record's product and the sum, side by side in registers."""
    if dtype == torch.float32:
        return Tiling(_side(p, 128), _side(d, 128), 32, 8, 3)
    return Tiling(_side(p, 128), _side(d, 128), _side(t, 64), 8, 3)


def _side(size: int, most: int) -> int:
    """The power of two that covers `size`, between 16 and `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _precision(a: Tensor) -> str | None:
    """How tl.dot multiplies: bf16 exactly, float32 as TF32 where that is allowed."""
    if a.dtype == torch.bfloat16 or torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return None


def _options(a: Tensor, g: Tensor, tiling: Tiling) -> dict[str, Any]:
    """Arguments that both tile programs take."""
    masked = bool(a.shape[1] % tiling.t or g.shape[2] % tiling.p or a.shape[2] % tiling.d)
    return {
        "CHUNK": max(1, CHUNK_POSITIONS // tiling.t),
        "MASKED": masked,
        "PRECISION": _precision(a),
        "BLOCK_P": tiling.p,
        "BLOCK_D": tiling.d,
        "BLOCK_T": tiling.t,
        "num_warps": tiling.warps,
        "num_stages": tiling.stages,
    }


@cache
def _programs() -> Any:
    """The module of programs, which needs Triton."""
    return import_module("vestige.gradients.kernels.programs")
