"""The models and lots that are timed: what is built, how large it is, in which precision."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.models import (
    CLASSES,
    GPT2,
    LENGTH,
    PIXELS,
    GPT2Size,
    Llama,
    LlamaSize,
    ViT,
)
from vestige.train.models import build
from vestige.train.recipes.wide_resnet import wide_resnet

Lot = tuple[nn.Module, Tensor, Tensor]


def small_images(name: str) -> Callable[[int], Lot]:
    """A model of the command line on 3x32x32 images."""

    def make(lot: int) -> Lot:
        model = build(name, (3, 32, 32), 10, seed=0)
        return model, *_images(lot, 32, 10)

    return make


def _images(lot: int, pixels: int, classes: int) -> tuple[Tensor, Tensor]:
    return torch.randn(lot, 3, pixels, pixels), torch.randint(0, classes, (lot,))


def wrn(lot: int, **sizes: int) -> Lot:
    """WRN-16-4 with GroupNorm and standardised weights on 3x32x32 images."""
    return wide_resnet((3, 32, 32), 10, **sizes), *_images(lot, 32, 10)


def vit(lot: int) -> Lot:
    """ViT-B/16 on images of 224 pixels."""
    return ViT(), *_images(lot, PIXELS, CLASSES)


def _texts(lot: int, length: int, words: int) -> tuple[Tensor, Tensor]:
    text = torch.randint(0, words, (lot, length + 1))
    return text[:, :-1], text[:, 1:]


def gpt2(lot: int, length: int = 256, size: GPT2Size | None = None) -> Lot:
    """GPT-2 on texts of `length` words; beyond 1,024 it has more places."""
    size = size or GPT2Size(length=max(length, LENGTH))
    return GPT2(size), *_texts(lot, length, size.words)


def llama_lora(lot: int, length: int = 256, size: LlamaSize | None = None) -> Lot:
    """A Llama-shaped 1B with adapters."""
    size = size or LlamaSize()
    return Llama(size), *_texts(lot, length, size.words)


def perceptron(lot: int, width: int) -> Lot:
    """Three hidden layers of `width`."""
    wide = [layer for _ in range(2) for layer in (nn.Linear(width, width), nn.ReLU())]
    layers = [nn.Flatten(), nn.Linear(3072, width), nn.ReLU(), *wide, nn.Linear(width, 10)]
    return nn.Sequential(*layers), *_images(lot, 32, 10)


MODELS: dict[str, Callable[..., Lot]] = {
    **{name: small_images(name) for name in ("mlp", "cnn", "resnet18")},
    "wrn-16-4": wrn,
    "vit": vit,
    "gpt2": gpt2,
    "llama-lora": llama_lora,
    "perceptron": perceptron,
}


@dataclass(frozen=True)
class Workload:
    """A model, a lot and a precision: bf16 autocast, TF32 products, or torch's own defaults."""

    model: str
    lot: int
    precision: str = "fp32"
    sizes: Mapping[str, Any] = field(default_factory=dict)

    def make(self, device: str) -> Lot:
        """The same model and numbers every time, on the device."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model, x, y = MODELS[self.model](self.lot, **self.sizes)
        return model.to(device), x.to(device), y.to(device)

    def autocast(self, device: str) -> contextlib.AbstractContextManager[Any]:
        """What the forward pass runs in."""
        return torch.autocast(device, torch.bfloat16, enabled=self.precision == "bf16")

    @contextlib.contextmanager
    def products(self) -> Iterator[None]:
        """float32 products on tensor cores where the precision is TF32, and only there."""
        before = torch.backends.cuda.matmul.allow_tf32
        torch.backends.cuda.matmul.allow_tf32 = self.precision == "tf32"
        try:
            yield
        finally:
            torch.backends.cuda.matmul.allow_tf32 = before


CPU = (Workload("mlp", 200), Workload("cnn", 128), Workload("resnet18", 16))
CUDA = (Workload("mlp", 4096), Workload("cnn", 1024), Workload("resnet18", 512))
