"""Fingerprints of what every rank must have alike, as numbers that a sum of floats carries."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

DIGITS = 4  # of 16 bits: float32 holds each exactly
_LARGE = 2**20  # bytes: a smaller tensor is copied beside others, since a kernel costs more


def fingerprints(seen: Sequence[Iterable[Tensor] | int], like: Tensor) -> Tensor:
    """`DIGITS` numbers below 2^16 for each of `seen`: tensors, or a number."""
    every = [torch.tensor(s) if isinstance(s, int) else _sum_of_bits(s, like) for s in seen]
    numbers = torch.stack([number.to(like.device, torch.int64) for number in every])
    shifts = torch.arange(0, 64, 16, device=like.device)
    return ((numbers[:, None] >> shifts) & 0xFFFF).flatten()


def _sum_of_bits(tensors: Iterable[Tensor], like: Tensor) -> Tensor:
    """The sum modulo 2^64 of all bits, eight bytes at a time: one number less or other changes it.

    A function of the values alone: zeros fill up the last eight bytes of every tensor.
    """
    zeros = torch.zeros(8, dtype=torch.uint8, device=like.device)
    large, joined = [], [zeros]
    for tensor in tensors:
        flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
        lacking = -len(flat) % 8
        if len(flat) < _LARGE or lacking or flat.storage_offset() % 8:
            joined += [flat, zeros[:lacking]] if lacking else [flat]
        else:
            large.append(flat)
    words = [flat.view(torch.int64) for flat in (*large, torch.cat(joined))]
    return torch.stack([word.sum() for word in words]).sum()
