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
from torch.nn.functional import pad

from vestige.gradients.kernels.bounds import DEEPEST
from vestige.gradients.precision import products_in_tf32

CHUNK_POSITIONS = 512  # summed by tensor cores in one go; longer sequences add up such sums
REACH = 2**31  # numbers; offsets within a record are 32-bit numbers
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
    return (
        a.ndim == 3
        and a.dtype == g.dtype
        and multiplies(a, products_in_tf32())
        and 1 < a.shape[1] <= DEEPEST
        and min(*a.shape, *g.shape) > 0
        and _padded_size(a) < REACH
        and _padded_size(g) < REACH
    )


def multiplies(values: Tensor, tf32: bool) -> bool:
    """Whether tensor cores multiply these numbers: bf16, or float32 where `tf32` is allowed."""
    return (
        values.is_cuda
        and (values.dtype == torch.bfloat16 or (tf32 and values.dtype == torch.float32))
        and available()
    )


@cache
def available() -> bool:
    """Whether Triton is installed and a device has the tensor cores that it needs."""
    found = find_spec("triton") is not None and torch.cuda.is_available()
    devices = range(torch.cuda.device_count() if found else 0)
    return found and all(torch.cuda.get_device_capability(d) >= (8, 0) for d in devices)


def arranged(values: Tensor) -> Tensor:
    """`values` (n, t, width) as the programs like them, copied once if they are not.

    Strides are multiples of `ALIGNED`, and so is the length of the axis that is last in memory:
    zeros are put behind it. float32 is rounded to TF32 and has its positions last: tensor cores
    take float32 in that order only. Positions and features that are zero change no product.
    """
    single = values.dtype == torch.float32
    values = values if reachable(values) else values.contiguous()
    if not single and _is_aligned(values):
        return values
    n, t, width = values.shape
    turned = values.stride(1) == 1
    if single or turned:
        wide_t, wide = padded(t, values.dtype), width
        out = values.new_empty((n, wide, wide_t)).transpose(1, 2)
    else:
        wide_t, wide = t, _ceil(width, ALIGNED) * ALIGNED
        out = values.new_empty((n, wide_t, wide))
    block_t, block = (64, 64) if single and not turned else (64, 32) if turned else (8, 256)
    down, across = _ceil(wide_t, block_t), _ceil(wide, block)
    _run("arrange", (n * down * across,),
        values, out, t, width, wide_t, wide, down, across, *values.stride(), *out.stride(),
        ROUND=single, BLOCK_T=block_t, BLOCK=block,
    )  # fmt: skip
    return out


def arranged_pair(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both factors of a product, arranged, with as many positions each."""
    return of_one_length(arranged(a), arranged(g))


def of_one_length(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Both with as many positions, zeros behind those of the shorter one.

    The programs take the number of positions from `a`: a shorter `g` would be read on into the next
    record.
    """
    longest = max(a.shape[1], g.shape[1])
    return _lengthened(a, longest), _lengthened(g, longest)


def reachable(values: Tensor) -> bool:
    """Whether a 32-bit offset reaches every number of a record."""
    inner = zip(values.shape[1:], values.stride()[1:], strict=True)
    return sum((size - 1) * stride for size, stride in inner) < REACH


def _padded_size(values: Tensor) -> int:
    """The numbers of a record, with all that may be put behind them."""
    return (values.shape[1] + 2 * ALIGNED) * (values.shape[2] + ALIGNED)


def _check_lengths(a: Tensor, g: Tensor) -> None:
    if a.shape[1] != g.shape[1]:
        raise ValueError(
            f"the factors have {a.shape[1]} and {g.shape[1]} positions: arrange them as a pair."
        )


def padded(t: int, dtype: torch.dtype) -> int:
    """How many positions are stored where they are last in memory: blocks are read unmasked."""
    block = ALIGNED if t <= ALIGNED or dtype == torch.bfloat16 else 2 * ALIGNED
    return _ceil(t, block) * block


class Unfolding(NamedTuple):
    """A convolution over images: two numbers each, for height and width."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]  # before the first row and column
    dilation: tuple[int, ...]
    out: tuple[int, ...]


def unfolded(images: Tensor, how: Unfolding, rounded: bool) -> Tensor:
    """The receptive fields of `images` (n, c, h, w) as factors (n, t, d), positions last in memory.

    With `rounded`, float32 becomes TF32 on the way, as `arranged` does it.
    """
    n, channels, high, wide = images.shape
    d, t = channels * how.kernel[0] * how.kernel[1], how.out[0] * how.out[1]
    wide_t = padded(t, images.dtype)
    out = images.new_empty((n, d, wide_t))
    block_t = _side(wide_t, 128)
    block_d = 4096 // block_t
    down, across = _ceil(d, block_d), _ceil(wide_t, block_t)
    pairs = (*how.kernel, *how.stride, *how.padding, *how.dilation)
    _run("unfold", (n * down * across,),
        images, out, d, t, wide_t, down, across, high, wide, how.out[1], *pairs, *images.stride(),
        ROUND=rounded and images.dtype == torch.float32, BLOCK_D=block_d, BLOCK_T=block_t,
    )  # fmt: skip
    return out.transpose(1, 2)


def row_squares(values: Tensor, empty: bool = False, limited: bool = False) -> Tensor:
    """The squared norms of rows (n, width), (n,), in float64, infinite where a row is not finite.

    With `empty`, what is not finite in `values` becomes zero, so that a factor of zero is enough to
    drop a row. With `limited`, a norm whose square float32 could not hold is infinite, too.
    """
    n, width = values.shape
    parts = 1 if limited else max(1, min(_ceil(width, 8192), 2048 // n))
    part = _ceil(_ceil(width, parts), 1024) * 1024
    out = values.new_empty((n, _ceil(width, part)), dtype=torch.float64)
    _run(
        "row_squares", out.shape, values, out, width, part, values.stride(0),
        EMPTY=empty, LIMITED=limited, BLOCK=1024,
    )  # fmt: skip
    return out.sum(1) if out.shape[1] > 1 else out.squeeze(1)


def affine_sums(x: Tensor, g: Tensor, means: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    """For each record, the gradients of a layer norm's weight and bias, (n, width) each.

    x and g are (n, positions, width), means and scales have a number for each position.
    """
    n, t, width = x.shape
    out = x.new_empty((2, n, width), dtype=torch.float32)
    block_t = _side(t, 32)
    _run(
        "position_sums",
        (n, _ceil(width, 64)),
        x,
        g,
        means,
        scales,
        out[0],
        out[1],
        t,
        width,
        BLOCK_T=block_t,
        BLOCK=64,
    )
    return out[0], out[1]


def affine_channel_sums(
    x: Tensor, g: Tensor, means: Tensor, scales: Tensor
) -> tuple[Tensor, Tensor]:
    """The same of a group norm: x and g are (n, channels, positions), means (n, groups)."""
    n, channels, size = x.shape
    out = x.new_empty((2, n, channels), dtype=torch.float32)
    block = _side(size, 1024)
    rows = max(1, 2048 // block)
    _run("channel_sums", (_ceil(n * channels, rows),),
        x, g, means, scales, out[0], out[1], n * channels, size, channels // means.shape[1],
        BLOCK_R=rows, BLOCK=block,
    )  # fmt: skip
    return out[0], out[1]


def square_norms(a: Tensor, g: Tensor) -> tuple[Tensor, Tensor]:
    """Certified squared norms, (n,), in float64, and the part of the norms that the sum's own
    rounding has. No number of a product leaves the registers."""
    _check_lengths(a, g)
    (n, t, d), p = a.shape, g.shape[2]
    tiling = _norm_tiling(t, p, d, a.dtype)
    rows, columns = (8, 256) if a.stride(2) == 1 else (_side(t, 32), 128)
    blocks = _ceil(t, rows)
    partial = a.new_empty((n, blocks, 3), dtype=torch.float64)
    _run(
        "term_sums",
        (n, blocks),
        a,
        g,
        partial,
        t,
        d,
        p,
        *a.stride(),
        *g.stride(),
        BLOCK_T=rows,
        BLOCK=columns,
    )
    tiles = _ceil(p, tiling.p) * _ceil(d, tiling.d)
    # Short records one after the other in one program: the next one loads while this one ends.
    records = _power_of_two(max(1, min(n, 16 * tiling.t // t, n * tiles // 1024)))
    squares = a.new_empty((n, tiles), dtype=torch.float32)
    _run("tile_squares", (tiles * _ceil(n, records),),
        a, g, squares, n, t, d, p, *a.stride(), *g.stride(),
        RECORDS=records, LONG=t > CHUNK_POSITIONS, **_options(a, g, tiling),
    )  # fmt: skip
    out = a.new_empty((2, n), dtype=torch.float64)
    roundings = _depth(t, tiling), tiling.p + tiling.d
    _run("certify", (n,), partial, squares, out, blocks, tiles, t, d, p, *roundings, BLOCK=256)
    return out[0], out[1]


def add_weighted(a: Tensor, g: Tensor, factors: Tensor, total: Tensor) -> None:
    """Add sum_i factors[i] G_i to `total` (p, d), factors in float32 on float32 products."""
    _check_lengths(a, g)
    (n, t, wide_d), wide_p = a.shape, g.shape[2]
    p, d = total.shape
    tiling = _sum_tiling(t, p, d, a.dtype)
    tiles = _ceil(p, tiling.p) * _ceil(d, tiling.d)
    records = _ceil(n, _parts(tiles, a.device))
    parts = _ceil(n, records)
    direct = parts == 1 and total.dtype == torch.float32 and total.stride(-1) == 1
    out = total.unsqueeze(0) if direct else a.new_empty((parts, p, d), dtype=torch.float32)
    _run("weighted_tiles", (tiles * parts,),
        a, g, factors.float(), out, n, t, wide_d, wide_p, d, p, *a.stride(), *g.stride(),
        out.stride(0), out.stride(1), records, ADD=direct, **_options(a, g, tiling),
    )  # fmt: skip
    if direct:
        return
    if total.is_contiguous() and total.dtype == torch.float32:
        total.view(-1).addmv_(out.view(parts, -1).t(), _ones(parts, total.device))
    else:
        total.add_(out.sum(0))


def _depth(t: int, tiling: Tiling) -> int:
    """The longest chain of additions on the way of one product into the sum over positions."""
    chunk = max(1, CHUNK_POSITIONS // tiling.t) * tiling.t
    return t if t <= chunk else chunk + _ceil(t, chunk)


def _norm_tiling(t: int, p: int, d: int, dtype: torch.dtype) -> Tiling:
    """The tile of `square_norms`, by measurement: large, because a product is all it holds."""
    positions = 32 if dtype == torch.float32 else 64
    if t <= 32:
        return Tiling(_side(p, 128), _tile(d, 128), _side(t, 32), 4, 3)
    if t > CHUNK_POSITIONS:  # a product and the sum of its chunks
        return Tiling(_side(p, 64), _tile(d, 256), positions, 8, 3)
    return Tiling(_side(p, 128), _tile(d, 256), positions, 8, 3)


def _sum_tiling(t: int, p: int, d: int, dtype: torch.dtype) -> Tiling:
    """The tile of `add_weighted`, by measurement: a product and the sum share the registers."""
    positions = _side(t, 32 if dtype == torch.float32 else 64)
    if dtype == torch.bfloat16 and p * d >= 2**24:
        return Tiling(128, 256, positions, 8, 3)
    return Tiling(_side(p, 64), _tile(d, 128), positions, 4, 3)


def _parts(tiles: int, device: torch.device) -> int:
    """Into how many parts the records go, each with a sum of its own, added up in order: a small
    weight has too few tiles to occupy all processors, each of which has room for two."""
    places = _places(device)
    if tiles <= places:
        return places // tiles
    return 3 if tiles < 4 * places else 1


@cache
def _places(device: torch.device) -> int:
    return 2 * int(torch.cuda.get_device_properties(device).multi_processor_count)


@cache
def _ones(count: int, device: torch.device) -> Tensor:
    return torch.ones(count, device=device)


def _is_aligned(values: Tensor) -> bool:
    """Whether sixteen bytes of a row (or of a column) can be read at once, at any of its tiles."""
    by_record, *inner = values.stride()
    last = values.shape[1 if inner[0] == 1 else 2]
    ends = min(inner) == 1 and values.data_ptr() % 16 == 0 and last % ALIGNED == 0
    return ends and by_record % ALIGNED == 0 and max(inner) % ALIGNED == 0


def _lengthened(values: Tensor, t: int) -> Tensor:
    """`values` with zero positions behind its own."""
    return values if values.shape[1] == t else pad(values, (0, 0, 0, t - values.shape[1]))


def _ceil(size: int, part: int) -> int:
    return -(-size // part)


def _side(size: int, most: int) -> int:
    """The power of two that covers `size`, between 16 and `most`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def _tile(size: int, most: int) -> int:
    """The largest side up to `most` of whose tiles at most an eighth is empty, or the smallest."""
    sides = [side for side in (256, 128, 64) if side <= most]
    fits = (side for side in sides if _ceil(size, side) * side <= size * 9 // 8)
    return _side(size, most) if size < 64 else next(fits, sides[-1])


def _options(a: Tensor, g: Tensor, tiling: Tiling) -> dict[str, Any]:
    """Arguments that both tile programs take."""
    blocks = dict(zip(("BLOCK_P", "BLOCK_D", "BLOCK_T"), tiling[:3], strict=True))
    masked = bool(a.shape[1] % tiling.t or g.shape[2] % tiling.p or a.shape[2] % tiling.d)
    run = {"num_warps": tiling.warps, "num_stages": tiling.stages}
    return {"CHUNK": max(1, CHUNK_POSITIONS // tiling.t), "MASKED": masked, **blocks, **run}


def _power_of_two(size: int) -> int:
    """The largest one up to `size`: few programs are compiled, whatever the lot's size."""
    return 1 << (size.bit_length() - 1)


_COMPILED: dict[tuple[Any, ...], tuple[Any, list[str]]] = {}


def _run(name: str, grid: tuple[int, ...], *args: Any, **constants: Any) -> None:
    """Launch a program.

    Triton looks at all arguments every time, which takes longer than a small program runs. What it
    compiled is kept here by what it looks at: types, alignment, and which numbers are 1 or
    multiples of 16.
    """
    kinds = [
        (arg.dtype, arg.device.index, arg.data_ptr() % 16 == 0)
        if isinstance(arg, Tensor)
        else (arg == 1, arg % 16 == 0, arg >= 2**31)
        for arg in args
    ]
    device = args[0].device
    if device.index != torch.cuda.current_device():  # Triton launches where torch is
        with torch.cuda.device(device):
            _run(name, grid, *args, **constants)
        return
    key = (name, *kinds, *constants.items())
    known = _COMPILED.get(key)
    if known is None:
        program = getattr(_programs(), name)
        order = [argument for argument in program.arg_names if argument in constants]
        _COMPILED[key] = program[grid](*args, **constants), order
        return
    compiled, order = known
    compiled[(*grid, 1, 1)[:3]](*args, *(constants[argument] for argument in order))


@cache
def _programs() -> Any:
    """The module of programs, which needs Triton."""
    return import_module("vestige.gradients.kernels.programs")
