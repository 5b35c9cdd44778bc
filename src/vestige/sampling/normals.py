"""Standard normal numbers from secret bits, each a function of its place in a flat vector.

On the CPU the vector is made in blocks of fixed length, each from a stream of its own, so that a
process that holds a part of the vector makes the blocks which that part touches. On a GPU a number
follows from a seed and its place directly, by a counter-based generator (Philox 4x32, Salmon et
al. 2011). Both have tails far beyond the 6.7 standard deviations at which pairs of 32-bit numbers
end: what lies beyond would show that a record was there.

Guarantee: the numbers are those of a normal law to float32's rounding, up to ten standard
deviations (in float64 on a CPU up to 8.5, beyond which lies one number in 10^17); nothing is
claimed against attacks on floating-point sampling (arXiv 2112.05307).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import CipherContext
from torch import Tensor

Tails = Callable[[], CipherContext]  # where the bits of far numbers come from

_FAR = 5.4  # a radius that leaves fewer than 11 of 32 bits
BLOCK = 2**18  # numbers of noise made at a time; even, so that a block is whole pairs


@dataclass(frozen=True)
class Held:
    """The ranges of places, of a flat vector of `length`, that a process holds side by side."""

    length: int
    ranges: tuple[tuple[int, int], ...]

    def blocks(self) -> Iterator[tuple[slice, int, int, slice]]:
        """Where a piece lies here; its block's number and size; where it lies in the block.

        The last block ends with the vector, so its size too is the same for everybody.
        """
        here = 0
        for start, stop in self.ranges:
            for number in range(start // BLOCK, -(-stop // BLOCK)):
                low = number * BLOCK
                size = min(BLOCK, self.length - low)
                first, last = max(start, low), min(stop, low + size)
                at = slice(here + first - start, here + last - start)
                yield at, number, size, slice(first - low, last - low)
            here += stop - start


def whole(length: int) -> Held:
    """What a process holds that shares nothing."""
    return Held(length, ((0, length),))


def made_by() -> str:
    """What the numbers depend on beside key, place and device."""
    return f"torch {torch.__version__} {'with' if find_spec('triton') else 'without'} Triton"


def gpu_normals(seed: int, held: Held, like: Tensor) -> Tensor:
    """The numbers of `held` under a 64-bit seed, on the device of `like`."""
    out = torch.empty_like(like)
    if like.dtype != torch.float64 and like.is_cuda and find_spec("triton") is not None:
        from vestige.sampling.normal_program import fill

        here = 0
        for start, stop in held.ranges:
            fill(out[here : here + stop - start], seed, start)
            here += stop - start
        return out
    generator = torch.Generator(like.device)
    for at, number, size, part in held.blocks():
        # Blocks of a seed are told apart by an odd multiple: no two of them are the same seed.
        generator.manual_seed((seed + number * 0x9E3779B97F4A7C15) % 2**64)
        block = torch.empty(size, dtype=like.dtype, device=like.device)
        out[at] = block.normal_(generator=generator)[part]
    return out


class BoxMuller32:
    """Pairs of normals from pairs of 32-bit numbers, in buffers that are reused.

    32 bits alone would end at 6.7 standard deviations, and what lies beyond would show that a
    record was there. A radius above 5.4, one pair in two million, gets 53 bits more: |z| up to 10.
    """

    def __init__(self) -> None:
        self._zeros = bytes(4 * BLOCK)
        self._bytes = bytearray(4 * BLOCK + 16)  # update_into wants room for one more block
        self._bits = torch.frombuffer(self._bytes, dtype=torch.int32)
        self._work = torch.empty(BLOCK)
        self._out = torch.empty(BLOCK)

    def __call__(self, cipher: CipherContext, pairs: int, tails: Tails) -> Tensor:
        count = 2 * pairs
        cipher.update_into(memoryview(self._zeros)[: 4 * count], self._bytes)
        work, out = self._work[:count].copy_(self._bits[:count]), self._out[:count]
        radius, angle = work[:pairs], work[pairs:]
        # |x| + 1/2 is symmetric and never zero, so its logarithm is finite; it rounds to 2^31 at
        # most, so the logarithm is never above zero.
        radius.abs_().add_(0.5).mul_(2.0**-31).log_().mul_(-2).sqrt_()
        if float(radius.max()) > _FAR:
            self._refine(radius, tails)
        angle.mul_(math.pi * 2.0**-31)
        torch.cos(angle, out=out[:pairs])
        torch.sin(angle, out=out[pairs:])
        out.view(2, pairs).mul_(radius)
        return out

    def _refine(self, radius: Tensor, tails: Tails) -> None:
        """More bits for the radii whose 32 bits were used up by leading zeros."""
        far = (radius > _FAR).nonzero()[:, 0]
        bits = np.frombuffer(tails().update(bytes(8 * len(far))), dtype=np.uint64) >> np.uint64(11)
        between = (bits.astype(np.float64) + 0.5) * 2.0**-53 - 0.5
        uniform = np.abs(self._bits[far].numpy() + between) * 2.0**-31
        radius[far] = torch.from_numpy(np.sqrt(-2 * np.log(uniform))).to(radius.dtype)


class BoxMuller64:
    """The same from pairs of 53-bit numbers."""

    def __call__(self, cipher: CipherContext, pairs: int, tails: Tails) -> Tensor:
        bits = np.frombuffer(cipher.update(bytes(16 * pairs)), dtype=np.uint64)
        uniform = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
        return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]))
