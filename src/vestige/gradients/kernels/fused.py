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

CHUNK_POSITIONS = 512  # summed by tensor cores in one go; longer sequences add up such sums
ALIGNED = 16  # numbers; strides that are no multiple of it are read one number at a time


class Tiling(NamedTuple):
    """The tile of a program, and how it is run."""

    p: int
    d: int
    t: int
    warps: int
    stages: int


def covers(a: Tensor, g: Tensor) -> bool:
    """Whether the programs take these factors: with positions, in bf16, or float32 as TF32."""
    tf32 = a.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return (
        a.is_cuda
        and a.ndim == 3
        and a.dtype == g.dtype
        and (tf32 or a.dtype == torch.bfloat16)
        and 1 < a.shape[1] <= DEEPEST
        and min(*a.shape, *g.shape) > 0
        and available()
    )


@cache
def available() -> bool:
    """Whether Triton is installed and a device has the tensor cores that it needs."""
    found = find_spec("triton") is not None and torch.cuda.is_available()
    return found and torch.cuda.get_device_capability() >= (8, 0)


def arranged(values: Tensor) -> Tensor:
    """`values` as the programs like them, copied once if they are not.

    Strides are multiples of `ALIGNED`. float32 is rounded to TF32 and has its positions last in
    memory: tensor cores take float32 in that order only.
    """
    single = values.dtype == torch.float32
    if not single and _is_aligned(values):
        return values
    n, t, width = values.shape
    if single:
        out = values.new_empty((n, width, _ceil(t, ALIGNED) * ALIGNED)).transpose(1, 2)[:, :t]
    else:
        out = values.new_empty((n, t, _ceil(width, ALIGNED) * ALIGNED))[:, :, :width]
    down, across, strides = _ceil(t, 64), _ceil(width, 64), (*values.stride(), *out.stride())
    _programs().arrange[(n * down * across,)](
        values, out, t, width, down, across, *strides, ROUND=single, BLOCK=64
    )
    return out


def square_norms(a: Tensor, g: Tensor) -> Tensor:
    """Certified squared norms, (n,), in float64: no number of a product leaves the registers."""
    (n, t, d), p = a.shape, g.shape[2]
    tiling, programs = _norm_tiling(t, p, d, a.dtype), _programs()
    rows, columns = (8, 256) if a.stride(2) == 1 else (_side(t, 32), 128)
    blocks = _ceil(t, rows)
    partial = a.new_empty((n, blocks, 3), dtype=torch.float64)
    programs.term_sums[(n, blocks)](
        a, g, partial, t, d, p, *a.stride(), *g.stride(), BLOCK_T=rows, BLOCK=columns
    )
    tiles = _ceil(p, tiling.p) * _ceil(d, tiling.d)
    # Short records one after the other in one program: the next one loads while this one ends.
    records = max(1, min(n, 16 * tiling.t // t, n * tiles // 1024))
    squares = a.new_empty((n, tiles), dtype=torch.float32)
    programs.tile_squares[(tiles * _ceil(n, records),)](
        a, g, squares, n, t, d, p, *a.stride(), *g.stride(),
        RECORDS=records, LONG=t > CHUNK_POSITIONS, **_options(a, g, tiling),
    )  # fmt: skip
    out = a.new_empty(n, dtype=torch.float64)
    roundings = _depth(t, tiling), tiling.p + tiling.d
    programs.certify[(n,)](partial, squares, out, blocks, tiles, t, d, p, *roundings, BLOCK=256)
    return out


def add_weighted(a: Tensor, g: Tensor, factors: Tensor, total: Tensor) -> None:
    """Add sum_i factors[i] G_i to `total` (p, d), factors in float32 on float32 products."""
    (n, t, d), p = a.shape, g.shape[2]
    tiling = _sum_tiling(t, p, d, a.dtype)
    tiles = _ceil(p, tiling.p) * _ceil(d, tiling.d)
    records = _ceil(n, _parts(tiles, a.device))
    parts = _ceil(n, records)
    direct = parts == 1 and total.dtype == torch.float32 and total.stride(-1) == 1
    out = total.unsqueeze(0) if direct else a.new_empty((parts, p, d), dtype=torch.float32)
    _programs().weighted_tiles[(tiles * parts,)](
        a, g, factors.float(), out, n, t, d, p, *a.stride(), *g.stride(),
        out.stride(0), out.stride(1), records, ADD=direct, **_options(a, g, tiling),
    )  # fmt: skip
    if not direct:
        total.add_(out.sum(0))


def _depth(t: int, tiling: Tiling) -> int:
    """The longest chain of additions on the way of one product into the sum over positions."""
    chunk = max(1, CHUNK_POSITIONS // tiling.t) * tiling.t
    return t if t <= chunk else chunk + _ceil(t, chunk)


def _norm_tiling(t: int, p: int, d: int, dtype: torch.dtype) -> Tiling:
    """The tile of `square_norms`, by measurement: large, because a product is all it holds."""
    positions = 32 if dtype == torch.float32 else 64
    if t <= 32:
        return Tiling(_side(p, 128), _side(d, 128), _side(t, 32), 4, 3)
    if t > CHUNK_POSITIONS:  # a product and the sum of its chunks
        return Tiling(_side(p, 64), _side(d, 256), positions, 8, 3)
    return Tiling(_side(p, 128), _side(d, 256), positions, 8, 3)


def _sum_tiling(t: int, p: int, d: int, dtype: torch.dtype) -> Tiling:
    """The tile of `add_weighted`, by measurement: a product and the sum share the registers."""
    positions = 32 if dtype == torch.float32 else _side(t, 64)
    if dtype == torch.bfloat16 and p * d >= 2**24:
        return Tiling(128, 256, positions, 8, 3)
    return Tiling(_side(p, 64), _side(d, 128), positions, 4, 3)


def _parts(tiles: int, device: torch.device) -> int:
    """Into how many parts the records go, each with a sum of its own, added up in order: a small
    weight has too few tiles to occupy all processors, each of which has room for two."""
    places = 2 * torch.cuda.get_device_properties(device).multi_processor_count
    if tiles <= places:
        return places // tiles
    return 3 if tiles < 4 * places else 1


def _is_aligned(values: Tensor) -> bool:
    """Whether sixteen bytes of a row (or of a column) can be read at once, at any of its tiles."""
    by_record, *inner = values.stride()
    ends = min(inner) == 1 and values.data_ptr() % 16 == 0
    return ends and by_record % ALIGNED == 0 and max(inner) % ALIGNED == 0


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _side(size: int, most: int) -> int:
    """The power of two that covers `size`, between 16 and `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _options(a: Tensor, g: Tensor, tiling: Tiling) -> dict[str, Any]:
    """Arguments that both tile programs take."""
    blocks = dict(zip(("BLOCK_P", "BLOCK_D", "BLOCK_T"), tiling[:3], strict=True))
    masked = bool(a.shape[1] % tiling.t or g.shape[2] % tiling.p or a.shape[2] % tiling.d)
    run = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return {"CHUNK": max(1, CHUNK_POSITIONS // tiling.t), "MASKED": masked, **blocks, **run}


@cache
def _programs() -> Any:
    """The module of programs, which needs Triton."""
    return import_module("vestige.gradients.kernels.programs")
