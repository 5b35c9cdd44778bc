"""Secret random streams for lots and noise, keyed once and addressed by step.

Every draw of a run is a function of (key, purpose, step): the key is 256 bits from the operating
system, or the hash of a `noise_seed` in test mode. Addressing by step means that no generator state
exists that could be saved, leaked or rewound: a resumed test-mode run draws the same lots and noise
again, and any other run has a fresh key and can never repeat a draw.

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
import secrets

import numpy as np
import numpy.typing as npt
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from torch import Tensor

from vestige.errors import ConfigError

LOTS, NOISE = b"lots", b"noise"


class Randomness:
    """The secret streams of one run."""

    def __init__(self, noise_seed: int | None = None, secure: bool = False) -> None:
        if noise_seed is not None and (
            isinstance(noise_seed, bool) or not isinstance(noise_seed, int)
        ):
            raise ConfigError(
                f"noise_seed={noise_seed!r} must be an integer, or None for fresh noise from the "
                "operating system."
            )
        self.repeatable = noise_seed is not None
        self.secure = secure
        self._key = (
            secrets.token_bytes(32)
            if noise_seed is None
            else hashlib.sha256(b"vestige test mode " + str(noise_seed).encode()).digest()
        )

    def __getstate__(self) -> None:
        raise TypeError("the random streams of a private run are secret and cannot be saved")

    def stream(self, purpose: bytes, step: int, count: int) -> bytearray:
        """`count` bytes of the stream of this purpose and step."""
        nonce = hashlib.sha256(purpose + step.to_bytes(8, "big")).digest()[:8] + bytes(8)
        cipher = Cipher(algorithms.AES(self._key), modes.CTR(nonce)).encryptor()
        out = bytearray(count + 15)  # update_into wants room for one more block
        cipher.update_into(bytes(count), out)
        return out

    def uniforms(self, purpose: bytes, step: int, count: int) -> npt.NDArray[np.float64]:
        """`count` numbers in (0, 1], on the grid of 2^-53."""
        bits = np.frombuffer(self.stream(purpose, step, 8 * count), dtype=np.uint64, count=count)
        numbers = ((bits >> np.uint64(11)) + np.uint64(1)).astype(np.float64)
        return numbers * 2.0**-53

    def normals_(self, out: Tensor, step: int) -> Tensor:
        """Fill the flat tensor `out` with the standard normal noise of `step`."""
        if out.device.type != "cpu":
            if self.secure:
                return out.copy_(self.normals_(torch.empty(out.shape, dtype=out.dtype), step))
            seed = int.from_bytes(self.stream(NOISE, step, 8)[:8], "big") - 2**63
            return out.normal_(generator=torch.Generator(out.device).manual_seed(seed))
        if out.dtype == torch.float64:
            return out.copy_(self._normals64(out.numel(), step))
        return out.copy_(self._normals32(out.numel(), step))

    def _normals32(self, count: int, step: int) -> Tensor:
        """Box-Muller from 32-bit numbers: |z| up to 6.6, radius exact to float32 near zero."""
        half = (count + 1) // 2
        bits = torch.frombuffer(
            self.stream(NOISE, step, 8 * half), dtype=torch.int32, count=2 * half
        )
        # |x| + 1/2 is symmetric and never zero, so its logarithm is finite.
        radius = bits[:half].float().abs_().add_(0.5).mul_(2.0**-31).clamp_(max=1)
        radius.log_().mul_(-2).sqrt_()
        angle = bits[half:].float().mul_(math.pi * 2.0**-31)
        out = torch.empty(2 * half)
        torch.mul(radius, torch.cos(angle), out=out[:half])
        torch.mul(radius, angle.sin_(), out=out[half:])
        return out[:count]

    def _normals64(self, count: int, step: int) -> Tensor:
        """Box-Muller from 53-bit numbers."""
        half = (count + 1) // 2
        uniform = self.uniforms(NOISE, step, 2 * half)
        radius = np.sqrt(-2 * np.log(uniform[:half]))
        angle = 2 * math.pi * uniform[half:]
        return torch.from_numpy(
            np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]
        )
