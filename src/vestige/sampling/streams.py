"""Secret random streams for lots, noise and masks, keyed once and addressed by step.

Every draw of a run is a function of (key, purpose, step): the key is 256 bits from the operating
system, or the hash of a `noise_seed` in test mode. Addressing by step means that no generator state
exists that could be saved, leaked or rewound: a resumed test-mode run draws the same lots and noise
again, and any other run has a fresh key and can never repeat a draw. (Dropout and augmentation draw
from generators that forward_randomness.py seeds out of these streams.)

The stream is AES-256 in counter mode, on the CPU also for ordinary runs: it is faster than torch's
own generator there, which takes only 32 bits of its seed into account. On a GPU ordinary noise
comes from torch's Philox generator under a 64-bit seed from this stream; `secure=True` makes it on
the CPU and copies it.

Guarantee: none against attacks on floating-point Gaussian sampling (Mironov 2012, arXiv 2112.05307)
or timing: the noise is rounded to the buffer's precision like everybody's.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from vestige.checks import is_whole
from vestige.errors import ConfigError, PrivacyError

LOTS, NOISE, WORKERS, FORWARD = b"lots", b"noise", b"workers", b"forward"
COUNTS, FIRST_LOOK, MEASURE, ACCEPT = b"counts", b"first look", b"measure", b"accept"
_FAR = 5.4  # a radius that leaves fewer than 11 of 32 bits
BLOCK = 2**18  # numbers of noise made at a time; even, so that a block is whole pairs


def secret_bytes(key: bytes, purpose: bytes, step: int) -> CipherContext:
    """A stream of bytes that nobody knows without the key, the same for the same address."""
    nonce = hashlib.sha256(purpose + step.to_bytes(8, "big")).digest()[:8] + bytes(8)
    return Cipher(algorithms.AES(key), modes.CTR(nonce)).encryptor()


class Randomness:
    """The secret streams of one run.

    `relabel` gives streams other addresses: a replay of a run keeps its lots and draws other noise.
    """

    relabel: Callable[[bytes], bytes] | None = None

    def __init__(self, noise_seed: int | None = None, secure: bool = False) -> None:
        if noise_seed is not None and not is_whole(noise_seed):
            raise ConfigError(
                f"noise_seed={noise_seed!r} must be an integer, or None for fresh noise from the "
                "operating system."
            )
        self.repeatable = noise_seed is not None
        self.secure = secure
        self._process = os.getpid()
        self._box_muller = _BoxMuller32()
        self._key = (
            secrets.token_bytes(32)
            if noise_seed is None
            else hashlib.sha256(b"vestige test mode " + str(noise_seed).encode()).digest()
        )

    def __getstate__(self) -> None:
        raise TypeError("the random streams of a private run are secret and cannot be saved")

    def stream(self, purpose: bytes, step: int) -> CipherContext:
        """The secret bytes of one address, in the process that has the key."""
        if os.getpid() != self._process:
            raise PrivacyError(
                "this process was forked after make_private: two processes would add the same "
                "noise. Call make_private in the process that trains."
            )
        address = purpose if self.relabel is None else self.relabel(purpose)
        return secret_bytes(self._key, address, step)

    def uniforms(self, purpose: bytes, step: int, count: int) -> npt.NDArray[np.float64]:
        """`count` numbers in (0, 1], on the grid of 2^-53."""
        stream = self.stream(purpose, step).update(bytes(8 * count))
        bits = np.frombuffer(stream, dtype=np.uint64)
        numbers = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64)
        return numbers * 2.0**-53

    def normals(self, purpose: bytes, step: int, count: int) -> npt.NDArray[np.float64]:
        """A few standard normal numbers."""
        pairs = self.uniforms(purpose, step, 2 * count).reshape(2, count)
        radius: npt.NDArray[np.float64] = np.sqrt(-2 * np.log(pairs[0]))
        radius *= np.cos(2 * math.pi * pairs[1])
        return radius

    def normal_blocks(
        self, like: Tensor, step: int, purpose: bytes = NOISE
    ) -> Iterator[tuple[slice, Tensor]]:
        """The standard normal noise of `step` for a flat tensor, a block at a time.

        Blocks fit a cache, so whoever adds them up touches the large tensor once.
        """
        count = like.numel()
        if like.device.type != "cpu" and not self.secure:
            seed = int.from_bytes(self.stream(purpose, step).update(bytes(8)), "big")
            generator = torch.Generator(like.device).manual_seed(seed)
            yield slice(0, count), torch.empty_like(like).normal_(generator=generator)
            return
        cipher, tails = self.stream(purpose, step), self.stream(b"tails of " + purpose, step)
        box_muller = _BoxMuller64() if like.dtype == torch.float64 else self._box_muller
        for start in range(0, count, BLOCK):
            size = min(BLOCK, count - start)
            noise = box_muller(cipher, (size + 1) // 2, tails)[:size]
            yield slice(start, start + size), noise.to(like.device)


class _BoxMuller32:
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

    def __call__(self, cipher: CipherContext, pairs: int, tails: CipherContext) -> Tensor:
        count = 2 * pairs
        cipher.update_into(memoryview(self._zeros)[: 4 * count], self._bytes)
        work, out = self._work[:count].copy_(self._bits[:count]), self._out[:count]
        radius, angle = work[:pairs], work[pairs:]
        # |x| + 1/2 is symmetric and never zero, so its logarithm is finite.
        radius.abs_().add_(0.5).mul_(2.0**-31).clamp_(max=1).log_().mul_(-2).sqrt_()
        if float(radius.max()) > _FAR:
            self._refine(radius, tails)
        angle.mul_(math.pi * 2.0**-31)
        torch.cos(angle, out=out[:pairs])
        torch.sin(angle, out=out[pairs:])
        out.view(2, pairs).mul_(radius)
        return out

    def _refine(self, radius: Tensor, tails: CipherContext) -> None:
        """More bits for the radii whose 32 bits were used up by leading zeros."""
        far = (radius > _FAR).nonzero()[:, 0]
        bits = np.frombuffer(tails.update(bytes(8 * len(far))), dtype=np.uint64) >> np.uint64(11)
        between = (bits.astype(np.float64) + 0.5) * 2.0**-53 - 0.5
        uniform = np.abs(self._bits[far].numpy() + between) * 2.0**-31
        radius[far] = torch.from_numpy(np.sqrt(-2 * np.log(uniform))).to(radius.dtype)


class _BoxMuller64:
    """The same from pairs of 53-bit numbers."""

    def __call__(self, cipher: CipherContext, pairs: int, tails: CipherContext) -> Tensor:
        bits = np.frombuffer(cipher.update(bytes(16 * pairs)), dtype=np.uint64)
        uniform = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53
        radius, angle = np.sqrt(-2 * np.log(uniform[:pairs])), 2 * math.pi * uniform[pairs:]
        return torch.from_numpy(np.concatenate([radius * np.cos(angle), radius * np.sin(angle)]))
