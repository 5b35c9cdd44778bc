"""Triton programs over tiles of a weight (p, d); `fused` launches them.

Every program owns a tile and goes through its records one after the other, and through a record's
positions from first to last: no record is divided along its sequence, and no two programs write the
same number, so results do not depend on the order in which programs run.

Triton is imported here, at the top: import this module only where there is a CUDA device.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(base, rows, columns, t, width, by_row, by_column, MASKED: tl.constexpr):
    """A tile (positions, columns) of one record, zero outside of it."""
    where = base + rows[:, None] * by_row + columns[None, :] * by_column
    if MASKED:
        return tl.load(where, mask=(rows[:, None] < t) & (columns[None, :] < width), other=0.0)
    return tl.load(where)


@triton.jit
def _rounded(x):
    """float32 rounded to TF32, to nearest; what is not finite stays as it is."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(tl.abs(x) < float("inf"), bits.to(tl.float32, bitcast=True), x)


@triton.jit
def arrange(
    values, out, t, width, wide_t, wide, down, across,
    by_record, by_row, by_column, out_record, out_row, out_column,
    ROUND: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A copy of `values` (t, width) in other strides, zero in the rest of (wide_t, wide); float32
    rounded to TF32 on the way."""
    block, record = tl.program_id(0), (tl.program_id(0) // (down * across)).to(tl.int64)
    rows = block // across % down * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = block % across * BLOCK + tl.arange(0, BLOCK)
    x = _load(values + record * by_record, rows, columns, t, width, by_row, by_column, True)
    if ROUND:
        x = _rounded(x)
    where = out + record * out_record + rows[:, None] * out_row + columns[None, :] * out_column
    tl.store(where, x, mask=(rows[:, None] < wide_t) & (columns[None, :] < wide))


@triton.jit
def unfold(
    x, out, d, t, wide_t, down, across, high, wide, out_wide, taps_high, taps_wide,
    step_high, step_wide, pad_high, pad_wide, apart_high, apart_wide,
    by_record, by_channel, by_row, by_column,
    ROUND: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """out[i] (d, wide_t) = the receptive fields of image i, a column for each output position."""
    block, record = tl.program_id(0), (tl.program_id(0) // (down * across)).to(tl.int64)
    fields = block // across % down * BLOCK_D + tl.arange(0, BLOCK_D)
    places = block % across * BLOCK_T + tl.arange(0, BLOCK_T)
    taps = taps_high * taps_wide
    channel, tap = fields // taps, fields % taps
    row = (places // out_wide * step_high - pad_high)[None, :]
    row += (tap // taps_wide * apart_high)[:, None]
    column = (places % out_wide * step_wide - pad_wide)[None, :]
    column += (tap % taps_wide * apart_wide)[:, None]
    inside = (row >= 0) & (row < high) & (column >= 0) & (column < wide)
    inside &= (fields[:, None] < d) & (places[None, :] < t)
    where = x + record * by_record + channel[:, None] * by_channel
    values = tl.load(where + row * by_row + column * by_column, mask=inside, other=0.0)
    if ROUND:
        values = _rounded(values)
    at = out + record * d * wide_t + fields[:, None] * wide_t + places[None, :]
    tl.store(at, values, mask=(fields[:, None] < d) & (places[None, :] < wide_t))


@triton.jit
def row_squares(
    values, out, width, part, by_row,
    EMPTY: tl.constexpr, LIMITED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out[i, j] = the sum of squares of a part of row i.

    EMPTY: a part that is not finite becomes zero. LIMITED: what float32 could not hold is infinite.
    """
    row, which = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start, within = values + row * by_row, tl.arange(0, BLOCK)
    first, last = which * part, min((which + 1) * part, width)
    total = tl.zeros((BLOCK,), tl.float64)
    for at in range(first, last, BLOCK):
        x = tl.load(start + at + within, mask=at + within < last, other=0.0).to(tl.float64)
        total += x * x
    square = tl.sum(total, 0)
    lost = (square != square) | (square == float("inf"))
    if LIMITED:
        square = tl.where(square > 3.4028234663852886e38, float("inf"), square)
    tl.store(out + row * tl.num_programs(1) + which, tl.where(lost, float("inf"), square))
    if EMPTY:  # noqa: SIM102 (known when compiled)
        if lost:
            for at in range(first, last, BLOCK):
                zero = tl.zeros((BLOCK,), tl.float32)
                tl.store(start + at + within, zero, mask=at + within < last)


@triton.jit
def position_sums(
    x, g, means, scales, weights, biases, t, width, BLOCK_T: tl.constexpr, BLOCK: tl.constexpr
):
    """Of a layer norm's g (t, width): its sums over positions, times the normal x and alone."""
    record = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    weight = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    bias = tl.zeros((BLOCK_T, BLOCK), tl.float32)
    for start in range(0, t, BLOCK_T):
        rows = start + tl.arange(0, BLOCK_T)
        at = record * t + rows
        mean = tl.load(means + at, mask=rows < t, other=0.0).to(tl.float32)
        scale = tl.load(scales + at, mask=rows < t, other=0.0).to(tl.float32)
        where, inside = at[:, None] * width + columns[None, :], columns[None, :] < width
        inside &= rows[:, None] < t
        value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(g + where, mask=inside, other=0.0).to(tl.float32)
        weight += slope * ((value - mean[:, None]) * scale[:, None])
        bias += slope
    out = record * width + columns
    tl.store(weights + out, tl.sum(weight, 0), mask=columns < width)
    tl.store(biases + out, tl.sum(bias, 0), mask=columns < width)


@triton.jit
def channel_sums(
    x, g, means, scales, weights, biases, count, size, grouped,
    BLOCK_R: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The same of a group norm: `count` channels of all records, `grouped` of them to a mean."""
    rows = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    mean = tl.load(means + rows // grouped, mask=rows < count, other=0.0).to(tl.float32)
    scale = tl.load(scales + rows // grouped, mask=rows < count, other=0.0).to(tl.float32)
    weight = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    bias = tl.zeros((BLOCK_R, BLOCK), tl.float32)
    for start in range(0, size, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        where = rows[:, None].to(tl.int64) * size + columns[None, :]
        inside = (rows[:, None] < count) & (columns[None, :] < size)
        value = tl.load(x + where, mask=inside, other=0.0).to(tl.float32)
        slope = tl.load(g + where, mask=inside, other=0.0).to(tl.float32)
        weight += slope * ((value - mean[:, None]) * scale[:, None])
        bias += slope
    tl.store(weights + rows, tl.sum(weight, 1), mask=rows < count)
    tl.store(biases + rows, tl.sum(bias, 1), mask=rows < count)


@triton.jit
def term_sums(
    a, g, partial, t, d, p,
    a_record, a_row, a_column, g_record, g_row, g_column,
    BLOCK_T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """partial[i, block] = sums of |a_t||g_t|, |a_t| and |g_t| over a block of positions."""
    record, block = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = tl.num_programs(1)
    rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
    squares_a = tl.zeros((BLOCK_T,), tl.float64)
    squares_g = tl.zeros((BLOCK_T,), tl.float64)
    for start in range(0, d, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        x = _load(a + record * a_record, rows, columns, t, d, a_row, a_column, True)
        x = x.to(tl.float64)
        squares_a += tl.sum(x * x, 1)
    for start in range(0, p, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        y = _load(g + record * g_record, rows, columns, t, p, g_row, g_column, True)
        y = y.to(tl.float64)
        squares_g += tl.sum(y * y, 1)
    norms_a, norms_g = tl.sqrt(squares_a), tl.sqrt(squares_g)
    at = partial + (record * blocks + block) * 3
    tl.store(at, tl.sum(norms_a * norms_g, 0))
    tl.store(at + 1, tl.sum(norms_a, 0))
    tl.store(at + 2, tl.sum(norms_g, 0))


@triton.jit
def tile_squares(
    a, g, out, n, t, d, p,
    a_record, a_row, a_column, g_record, g_row, g_column,
    RECORDS: tl.constexpr, CHUNK: tl.constexpr, LONG: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """out[i, tile] = the sum of squares of a tile of sum_t g[i, t] a[i, t]^T."""
    across = tl.cdiv(d, BLOCK_D)
    tiles = across * tl.cdiv(p, BLOCK_P)
    tile, first = tl.program_id(0) % tiles, tl.program_id(0) // tiles * RECORDS
    down = tile // across * BLOCK_P + tl.arange(0, BLOCK_P)
    along = tile % across * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(t, BLOCK_T)
    part = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    if LONG:
        whole = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for step in range(0, min(RECORDS, n - first) * blocks):
        record, block = (first + step // blocks).to(tl.int64), step % blocks
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
        x = _load(a + record * a_record, rows, along, t, d, a_row, a_column, MASKED)
        y = _load(g + record * g_record, rows, down, t, p, g_row, g_column, MASKED)
        part = tl.dot(tl.trans(y), x, part)
        if LONG:
            if (block % CHUNK == CHUNK - 1) | (block == blocks - 1):
                whole += part
                part = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
            if block == blocks - 1:
                tl.store(out + record * tiles + tile, tl.sum(tl.sum(whole * whole, 1), 0))
                whole = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
        else:
            if block == blocks - 1:
                tl.store(out + record * tiles + tile, tl.sum(tl.sum(part * part, 1), 0))
                part = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)


@triton.jit(do_not_specialize=["t", "d", "p", "depth", "summed"])
def certify(
    partial, squares, out, blocks, tiles, t, d, p, depth, summed,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """out[0, i] = the certified squared norm of row i: `bounds.certified` of the product form.

    out[1, i] = what the sum's own rounding has in it.
    """
    record = tl.program_id(0).to(tl.int64)
    within = tl.arange(0, BLOCK)
    products = tl.zeros((BLOCK,), tl.float64)
    inputs = tl.zeros((BLOCK,), tl.float64)
    gradients = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, blocks, BLOCK):
        at, inside = partial + (record * blocks + start + within) * 3, start + within < blocks
        products += tl.load(at, mask=inside, other=0.0)
        inputs += tl.load(at + 1, mask=inside, other=0.0)
        gradients += tl.load(at + 2, mask=inside, other=0.0)
    total = tl.zeros((BLOCK,), tl.float64)
    for start in range(0, tiles, BLOCK):
        tile = start + within
        square = tl.load(squares + record * tiles + tile, mask=tile < tiles, other=0.0)
        total += square.to(tl.float64)
    high, wide, positions = p.to(tl.float64), d.to(tl.float64), t.to(tl.float64)
    up = 1 + (high + wide + positions + 8) * 2.220446049250313e-16
    sums = tl.sum(products, 0) * up
    tiny = 1.1754943508222875e-38  # bounds.SMALLEST
    lost = tl.sqrt(wide) * tl.sum(gradients, 0) + tl.sqrt(high) * tl.sum(inputs, 0)
    lost = (lost * up + (2 * positions + 2) * tl.sqrt(high * wide)) * tiny
    unit = 1.1920928955078125e-07  # bounds.FLOAT32_UNIT
    # `summed` roundings lie between a square and the sum of a tile; a square below the smallest
    # normal number may be lost.
    norm = tl.sqrt(tl.sum(total, 0)) * (1 + summed.to(tl.float64) * unit)
    norm += tl.sqrt(high * wide * tiny) + depth.to(tl.float64) * unit * sums + lost
    slack = depth.to(tl.float64) * unit * sums + lost
    bound = tl.where(sums == 0, 0.0, tl.where(norm < sums, norm, sums) + slack)
    largest = 1.2676506002282294e30  # bounds.LARGEST_TERMS
    tl.store(out + record, tl.where(sums <= largest, bound * bound, float("inf")))
    tl.store(out + tl.num_programs(0) + record, tl.where(sums == 0, 0.0, slack))


@triton.jit
def weighted_tiles(
    a, g, factors, out, n, t, d, p, out_d, out_p,
    a_record, a_row, a_column, g_record, g_row, g_column, out_part, out_row, records,
    ADD: tl.constexpr, CHUNK: tl.constexpr, MASKED: tl.constexpr,
    BLOCK_P: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """A tile of sum_i factors[i] sum_t g[i, t] a[i, t]^T over `records` of the records."""
    across = tl.cdiv(d, BLOCK_D)
    tiles = across * tl.cdiv(p, BLOCK_P)
    tile, part_of = tl.program_id(0) % tiles, tl.program_id(0) // tiles
    first = part_of * records
    down = tile // across * BLOCK_P + tl.arange(0, BLOCK_P)
    along = tile % across * BLOCK_D + tl.arange(0, BLOCK_D)
    blocks = tl.cdiv(t, BLOCK_T)
    part = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    whole = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    for step in range(0, min(records, n - first) * blocks):
        record, block = (first + step // blocks).to(tl.int64), step % blocks
        rows = block * BLOCK_T + tl.arange(0, BLOCK_T)
        factor = tl.load(factors + record)
        x = _load(a + record * a_record, rows, along, t, d, a_row, a_column, MASKED)
        y = _load(g + record * g_record, rows, down, t, p, g_row, g_column, MASKED)
        part = tl.dot(tl.trans(y), x, part)
        if (block % CHUNK == CHUNK - 1) | (block == blocks - 1):
            # A row with factor zero may hold anything: 0 * inf is not zero.
            whole += tl.where(factor == 0, 0.0, factor * part)
            part = tl.zeros((BLOCK_P, BLOCK_D), tl.float32)
    where = out + part_of.to(tl.int64) * out_part + down[:, None].to(tl.int64) * out_row
    where += along[None, :]
    inside = (down[:, None] < out_p) & (along[None, :] < out_d)
    if ADD:
        whole += tl.load(where, mask=inside, other=0.0)
    tl.store(where, whole, mask=inside)
