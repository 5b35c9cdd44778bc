"""Layers whose inputs and output gradients are chosen to make one record's norm hard to bound.

The real engine runs on a lot of one record, and what arrives at its door is that record's
contribution as it is added.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.products import Hard
from vestige import PrivacyEngine
from vestige.audit.tape import Tape

Layer = tuple[nn.Module, Tensor, Tensor]
SIZE = {"n": 2, "t": 10, "p": 16, "d": 16}
HARD: list[dict[str, Any]] = [
    {},
    {"cancel": 0.0},
    {"cancel": 2.0**-7},
    {"cancel": 2.0**-12, "aligned": True},
    {"cancel": 2.0**-20},
    {"cancel": 0.0, "exponents": (30, 30)},  # what rounding leaves is far above the bound
    {"cancel": 2.0**-20, "exponents": (40, 40)},
    {"exponents": (-83, 83)},
    {"exponents": (83, -83), "cancel": 2.0**-7},
    {"exponents": (-148, 120), "cancel": 2.0**-7},
    {"exponents": (45, 45)},
    {"exponents": (-70, -70), "spread": 30},
    {"spread": 120, "zeros": True},
]


class FirstOutput(nn.Module):
    """A recurrent layer without its last state."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """What it says at every position."""
        out: Tensor = self.inner(x)[0]
        return out


def _empty(layer: nn.Module) -> nn.Module:
    """Weights of zero: whatever the input, the output is finite."""
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer


def _embedding(a: Tensor, g: Tensor) -> Layer:
    """The second half of the positions looks at the rows of the first."""
    generator = torch.Generator().manual_seed(0)
    half = torch.randint(0, 3, (len(g), g.shape[1] // 2), generator=generator)
    return nn.Embedding(3, g.shape[2]), half.repeat(1, 2), g


def _convolution(axes: int, kernel: int = 1, groups: int = 1) -> Callable[[Tensor, Tensor], Layer]:
    """Positions along the first axis."""

    def make(a: Tensor, g: Tensor) -> Layer:
        kind = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[axes - 1]
        wide = (kernel, *[1] * (axes - 1))
        layer = kind(a.shape[2], g.shape[2], wide, groups=groups)  # type: ignore[arg-type]
        x, h = (v.transpose(1, 2)[(..., *[None] * (axes - 1))] for v in (a, g))
        return _empty(layer), x, h[:, :, kernel - 1 :]

    return make


def _norm(layer: Callable[[int], nn.Module], channels: bool = False) -> Callable[..., Layer]:
    def make(a: Tensor, g: Tensor) -> Layer:
        x, h = (a.transpose(1, 2), g.transpose(1, 2)) if channels else (a, g)
        return layer(a.shape[2]), x, h

    return make


def _recurrent(kind: Any) -> Callable[[Tensor, Tensor], Layer]:
    def make(a: Tensor, g: Tensor) -> Layer:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return FirstOutput(kind(a.shape[2], 6, batch_first=True)), a, g[..., :6]

    return make


LAYERS: dict[str, Callable[[Tensor, Tensor], Layer]] = {
    "linear without positions": lambda a, g: (
        _empty(nn.Linear(a.shape[2], g.shape[2])),
        a[:, 0],
        g[:, 0],
    ),
    "linear with positions": lambda a, g: (_empty(nn.Linear(a.shape[2], g.shape[2])), a, g),
    "embedding": _embedding,
    "convolution of one axis": _convolution(1),
    "grouped convolution": _convolution(2, groups=4),
    "grouped convolution, kernel": _convolution(2, kernel=3, groups=4),
    "3-D convolution": _convolution(3),
    "3-D convolution, kernel": _convolution(3, kernel=2),
    "layer norm": _norm(nn.LayerNorm),
    "RMS norm": _norm(nn.RMSNorm),
    "group norm": _norm(lambda width: nn.GroupNorm(4, width), channels=True),
    "LSTM": _recurrent(nn.LSTM),
    "GRU": _recurrent(nn.GRU),
}


@contextmanager
def tensor_cores(on: bool) -> Iterator[None]:
    """float32 products and convolutions as TF32 on a GPU, or not at all."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = on
    try:
        yield
    finally:
        for backend, value in zip(backends, before, strict=True):
            backend.allow_tf32 = value


def contributions(
    name: str, hard: dict[str, Any], precision: str, device: str, clipping: str = "flat"
) -> list[float]:
    """What each record of a recipe adds by itself, in units of the bound."""
    a, g = (v.float() for v in Hard(**SIZE, precision=precision, **hard).factors())
    layer, x, h = LAYERS[name](a, g)
    with tensor_cores(precision == "tf32"):
        return [
            _contribution(layer.to(device), x[i : i + 1], h[i : i + 1], precision, clipping)
            for i in range(len(x))
        ]


def _contribution(layer: nn.Module, x: Tensor, h: Tensor, precision: str, clipping: str) -> float:
    device = next(layer.parameters()).device.type
    engine = PrivacyEngine("rdp")
    model, optimizer, loader = engine.make_private(
        module=layer,
        optimizer=torch.optim.SGD(layer.parameters(), lr=0.0),
        data_loader=DataLoader(TensorDataset(x.to(device), h.to(device)), batch_size=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        dataset_size=1,
        clipping=clipping,
        self_check=False,
    )
    try:
        with Tape(engine, sums=False) as tape:
            for inputs, slopes in loader:
                with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
                    out = model(inputs)
                engine.backward((out * slopes).flatten(1).sum(1))
                optimizer.step()
        return float(tape.seen.looks[0].values.double().norm())
    finally:
        engine.detach()
