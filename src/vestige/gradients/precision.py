"""How exactly torch multiplies float32 numbers, whichever of its settings said so.

torch has an old flag (`allow_tf32`, `set_float32_matmul_precision`) and a new one
(`fp32_precision`) for the same thing. Its products follow the new one, which the old one sets, too;
reading the old one raises once the two disagree. So only the new one is read and set here.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_BACKENDS: Any = torch.backends  # whose parts carry no annotations
_EXACT = ("ieee", "none")  # "none" says nothing, which means float32
# How far a product moves whose factors are rounded first, and as much again for its sum.
_ROUNDING = {"tf32": 2.0**-9, "bf16": 2.0**-6}


def products_in_tf32() -> bool:
    """Whether a GPU may round the factors of float32 matrix products to TF32."""
    return _said(_BACKENDS.cuda.matmul) not in _EXACT


def convolutions_in_tf32() -> bool:
    """Whether a GPU may round the factors of float32 convolutions to TF32."""
    return _said(_BACKENDS.cudnn.conv) not in _EXACT


def factor_rounding(device: torch.device) -> float:
    """How far rounded factors move a float32 sum on `device`, relative; 0 if they stay exact."""
    if device.type == "cuda":
        return _ROUNDING["tf32"] if products_in_tf32() or convolutions_in_tf32() else 0.0
    said = {_said(_BACKENDS.mkldnn.matmul), _said(_BACKENDS.mkldnn.conv)}
    return max(_ROUNDING.get(one, 0.0) for one in said) if device.type == "cpu" else 0.0


@contextmanager
def products(precision: str) -> Iterator[None]:
    """float32 matrix products on a GPU in this precision for a while."""
    with _set([_BACKENDS, _BACKENDS.cudnn, _BACKENDS.cuda.matmul], precision):
        yield


@contextmanager
def exact() -> Iterator[None]:
    """float32 arithmetic without rounded factors for a while, on CPUs and GPUs."""
    cudnn, cpu = _BACKENDS.cudnn, _BACKENDS.mkldnn
    gpu = [cudnn, _BACKENDS.cuda.matmul, cudnn.conv, cudnn.rnn]
    with _set([_BACKENDS, *gpu, cpu.matmul, cpu.conv, cpu.rnn], "ieee"):
        yield


@contextmanager
def _set(places: list[Any], precision: str) -> Iterator[None]:
    """Set `places`, the widest first: what follows a wider one is left to follow it again."""
    before: list[tuple[Any, str]] = []
    try:
        for place in places:
            was = place.fp32_precision
            if was != precision:
                place.fp32_precision = precision
                before.append((place, was))
        yield
    finally:
        for place, was in before:
            place.fp32_precision = was


def _said(place: Any) -> str:
    """What is set for one kind of product; TF32, which costs more slack, where torch won't say."""
    try:
        return str(place.fp32_precision)
    except (AttributeError, RuntimeError):
        return "tf32"
