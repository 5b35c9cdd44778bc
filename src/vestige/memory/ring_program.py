"""Triton programs over a ring of releases: inner products in one pass, and a mixture in one.

torch.mv launches a product for every piece of every part, hundreds a step for a large model, and
one product over all columns would add up too many float32 numbers in a row. Here a program owns a
piece of a part; what pieces add up to is float64. No two programs write the same number, so results
do not depend on the order in which programs run.

Triton is imported here, at the top: import this module only where there is a CUDA device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

PIECE = 2**14  # columns of a program, doubled until there are at most
_PIECES = 2**13  # of them and one more for every part
_BLOCK, _ROWS = 1024, 8  # columns and rows that are in registers at once


@triton.jit
def _dots(
    rows, new, pieces, out, by_row,
    R: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """out[piece, row] = the inner product of a row with `new` over the columns of a piece."""
    piece = tl.program_id(0)
    start, size = tl.load(pieces + piece * 3), tl.load(pieces + piece * 3 + 1)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    places = rows + row.to(tl.int64)[:, None] * by_row
    total = tl.zeros((ROWS, BLOCK), out.dtype.element_ty)
    for first in range(0, PIECE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside, here = column < size, start + column
        x = tl.load(new + here, mask=inside, other=0.0).to(out.dtype.element_ty)
        both = (row < R)[:, None] & inside[None, :]
        y = tl.load(places + here[None, :], mask=both, other=0.0).to(out.dtype.element_ty)
        total += y * x[None, :]
    tl.store(out + piece * R + row, tl.sum(total, 1), mask=row < R)


@triton.jit
def _mixture(
    rows, factors, pieces, out, by_row,
    R: tl.constexpr, BLOCK: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """out = the sum of the rows, each times the factor of its piece's part."""
    piece = tl.program_id(0)
    start, size = tl.load(pieces + piece * 3), tl.load(pieces + piece * 3 + 1)
    part = tl.load(pieces + piece * 3 + 2)
    for first in range(0, PIECE, BLOCK):
        column = first + tl.arange(0, BLOCK)
        inside, here = column < size, start + column
        total = tl.zeros((BLOCK,), out.dtype.element_ty)
        places = rows + here
        for row in range(R):
            factor = tl.load(factors + part * R + row)
            total += factor * tl.load(places, mask=inside, other=0.0).to(out.dtype.element_ty)
            places += by_row
        tl.store(out + here, total, mask=inside)


class Pieces:
    """The parts of a flat vector, cut into pieces of equal size that never cross a border."""

    def __init__(self, segments: Sequence[slice], device: torch.device) -> None:
        self._piece = PIECE
        while sum(s.stop - s.start for s in segments) > self._piece * _PIECES:
            self._piece *= 2
        table = [
            (start, min(self._piece, segment.stop - start), part)
            for part, segment in enumerate(segments)
            for start in range(segment.start, segment.stop, self._piece)
        ]
        self._table = torch.tensor(table, dtype=torch.int64).view(-1, 3).to(device)
        parts = torch.arange(len(segments), device=device)
        self._members = (self._table[:, 2] == parts[:, None]).double()

    def dots(self, rows: Tensor, new: Tensor) -> Tensor:
        """Inner products of `new` with each of `rows` in each part, (parts, rows), in float64."""
        out = new.new_empty(len(self._table), len(rows))
        grid = len(out), triton.cdiv(len(rows), _ROWS)
        _dots[grid](
            rows, new, self._table, out, rows.stride(0),
            R=len(rows), BLOCK=_BLOCK, PIECE=self._piece, ROWS=_ROWS,
        )  # fmt: skip
        return self._members @ out.double()

    def mix(self, rows: Tensor, factors: Tensor, out: Tensor) -> None:
        """Write the sum of `rows`, each times its factor in each part (parts, rows), to `out`."""
        _mixture[(len(self._table),)](
            rows, factors, self._table, out, rows.stride(0),
            R=len(rows), BLOCK=_BLOCK, PIECE=self._piece,
        )  # fmt: skip
