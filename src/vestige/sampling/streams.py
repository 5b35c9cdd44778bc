"""Secret random streams for lots, noise and masks, keyed once and addressed by step.

Every draw of a run is a function of (key, purpose, step): the key is 256 bits from the operating
system, or the hash of a `noise_seed` in test mode. Addressing by step means that no generator state
exists that could be saved, leaked or rewound: a resumed test-mode run draws the same lots and noise
again, and any other run has a fresh key and can never repeat a draw. (Dropout and augmentation draw
from generators that forward_randomness.py seeds out of these streams.)

The stream is AES-256 in counter mode, on the CPU also for ordinary runs: it is faster than torch's
own generator there, which takes only 32 bits of its seed into account. On a GPU ordinary noise
comes from a Philox generator under a 64-bit seed from this stream; `secure=True` makes it on the
CPU and copies it. Either way a number of noise is a function of its place in the flat vector, so
whoever holds a part of the vector makes that part of the same noise (normals.py).

Guarantee: none against attacks on floating-point Gaussian sampling (Mironov 2012, arXiv 2112.05307)
or timing: the noise is rounded to the buffer's precision like everybody's.
"""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext, algorithms, modes
from torch import Tensor

from vestige.checks import is_whole
from vestige.errors import ConfigError, PrivacyError
from vestige.sampling.normals import BoxMuller32, BoxMuller64, Held, gpu_normals, whole

LOTS, NOISE, WORKERS, FORWARD = b"lots", b"noise", b"workers", b"forward"
COUNTS, FIRST_LOOK, MEASURE, ACCEPT = b"counts", b"first look", b"measure", b"accept"
UNIT_ROWS = b"rows of unit "


def secret_bytes(key: bytes, purpose: bytes, step: int, block: int = 0) -> CipherContext:
    """A stream of bytes that nobody knows without the key, the same for the same address.

    Blocks of an address are 2^32 counts (64 GiB) apart on one counter, so they never overlap.
    """
    nonce = hashlib.sha256(purpose + step.to_bytes(8, "big")).digest()[:8]
    start = nonce + block.to_bytes(4, "big") + bytes(4)
    return Cipher(algorithms.AES(key), modes.CTR(start)).encryptor()


def key_of(noise_seed: int | None) -> bytes | None:
    """The key of test mode, which anybody can make; None for a run without a seed."""
    if noise_seed is None:
        return None
    return hashlib.sha256(b"vestige test mode " + str(noise_seed).encode()).digest()


class Randomness:
    """The secret streams of one run.

    `relabel` gives streams other addresses: a replay of a run keeps its lots and draws other noise.
    Several processes of one run have the same `key`; `share` is (rank, world): the rows of a lot
    that this one works on are every world-th. With `sharded` each has records of its own and draws
    from them all that it works on, at addresses of its own. `held` is the part of a flat vector
    that this process holds, and makes noise for: all of it if None.
    """

    relabel: Callable[[bytes], bytes] | None = None
    held: Held | None = None

    def __init__(
        self,
        noise_seed: int | None = None,
        secure: bool = False,
        key: bytes | None = None,
        share: tuple[int, int] = (0, 1),
        sharded: bool = False,
    ) -> None:
        if noise_seed is not None and not is_whole(noise_seed):
            raise ConfigError(
                f"noise_seed={noise_seed!r} must be an integer, or None for fresh noise from the "
                "operating system."
            )
        self.repeatable = noise_seed is not None
        self.secure = secure
        self._process = os.getpid()
        self._box_muller = BoxMuller32()
        self._key = key or key_of(noise_seed) or secrets.token_bytes(32)
        self.share, self.sharded = share, sharded

    def __getstate__(self) -> None:
        raise TypeError("the random streams of a private run are secret and cannot be saved")

    def stream(self, purpose: bytes, step: int, block: int = 0) -> CipherContext:
        """The secret bytes of one address, in the process that has the key."""
        if os.getpid() != self._process:
            raise PrivacyError(
                "this process was forked after make_private: two processes would add the same "
                "noise. Call make_private in the process that trains."
            )
        if self.sharded and (purpose == LOTS or purpose.startswith(UNIT_ROWS)):
            purpose += b" of shard " + self.share[0].to_bytes(4, "big")
        address = purpose if self.relabel is None else self.relabel(purpose)
        return secret_bytes(self._key, address, step, block)

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
        held = self.held or whole(like.numel())
        if like.device.type != "cpu" and not self.secure:
            seed = int.from_bytes(self.stream(purpose, step).update(bytes(8)), "big")
            yield slice(0, like.numel()), gpu_normals(seed, held, like)
            return
        box_muller = BoxMuller64() if like.dtype == torch.float64 else self._box_muller
        for (number, size), pieces in groupby(held.blocks(), key=lambda piece: piece[1:3]):
            cipher = self.stream(purpose, step, number)
            tails = partial(self.stream, b"tails of " + purpose, step, number)  # seldom needed
            noise = box_muller(cipher, (size + 1) // 2, tails)
            for at, _, _, part in pieces:  # of one block: it is made once
                yield at, noise[part].to(like.device)
