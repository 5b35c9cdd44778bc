"""A Triton program that fills a vector with standard normal numbers, each by its place.

Triton is imported here, at the top: import this module only where there is a CUDA device.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_PAIRS = 1024


@triton.jit
def pair(a, b, c):
    """Two normal numbers from three 32-bit words (Box and Muller 1958).

    The radius has 64 bits: 32 would end at 6.7 standard deviations. Its uniform number is never 0.
    """
    fine = (b.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    uniform = (a.to(tl.float32) + fine) * 2.3283064365386963e-10
    radius = tl.sqrt(-2.0 * tl.log(tl.minimum(uniform, 1.0)))
    angle = c.to(tl.float32) * 1.4629180792671596e-09
    return radius * tl.cos(angle), radius * tl.sin(angle)


@triton.jit
def _normals(out, seed, first, count, PAIRS: tl.constexpr):
    """out[k] = the normal number at place first + k; places 2j and 2j + 1 are one pair."""
    pairs = first // 2 + tl.program_id(0).to(tl.int64) * PAIRS + tl.arange(0, PAIRS)
    low, high = (pairs & 0xFFFFFFFF).to(tl.uint32), (pairs >> 32).to(tl.uint32)
    zero = low * 0
    a, b, c, _ = tl.philox(seed, low, high, zero, zero)
    x, y = pair(a, b, c)
    numbers = tl.interleave(x, y)
    start = first // 2 * 2 + tl.program_id(0).to(tl.int64) * (2 * PAIRS) - first
    here = start + tl.arange(0, 2 * PAIRS)
    tl.store(out + here, numbers, mask=(here >= 0) & (here < count))


def fill(out: Tensor, seed: int, first: int) -> None:
    """Fill `out`, flat, with the numbers of places `first`, `first` + 1, ... under `seed`."""
    programs = triton.cdiv(out.numel() + 1, 2 * _PAIRS)
    signed = seed - 2**64 if seed >= 2**63 else seed
    _normals[(programs,)](out, signed, first, out.numel(), PAIRS=_PAIRS)
