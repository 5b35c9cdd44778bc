"""The models and lots that are timed, and one training step of every engine on them."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.methods import (
    DPSAM,
    DPSGD,
    FO,
    METHODS,
    SMA,
    BandedInverse,
    Disk,
    DPSAMPerExample,
    FractionalNoise,
    Method,
)
from vestige.train.models import build

Step = Callable[[], None]


@dataclass(frozen=True)
class Workload:
    """A model of the command line on random 3x32x32 images."""

    model: str
    lot: int

    def make(self, device: str) -> tuple[nn.Module, Tensor, Tensor]:
        """The model, and one lot of inputs and labels."""
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(self.lot, 3, 32, 32, generator=generator).to(device)
        y = torch.randint(0, 10, (self.lot,), generator=generator).to(device)
        return build(self.model, (3, 32, 32), 10, seed=0).to(device), x, y


CPU = (Workload("mlp", 200), Workload("cnn", 128), Workload("resnet18", 16))
CUDA = (Workload("mlp", 4096), Workload("cnn", 1024), Workload("resnet18", 512))


def _loop(
    model: nn.Module, optimizer: Any, batches: Iterator[Any], criterion: Any = None
) -> Iterator[None]:
    """An ordinary training loop that pauses after every step; batches are drawn untimed."""
    criterion = criterion or nn.CrossEntropyLoss()
    for x, y in batches:
        yield
        optimizer.zero_grad()
        criterion(model(x), y).backward()
        optimizer.step()
        yield


def _closure_loop(model: nn.Module, optimizer: Any, batches: Iterator[Any]) -> Iterator[None]:
    """The same with optimizer.step(closure), for methods that evaluate a batch twice."""
    criterion = nn.CrossEntropyLoss()
    for x, y in batches:
        yield

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss: Tensor = criterion(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        yield


def _forever(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield x, y


def plain(workload: Workload, device: str) -> Iterator[None]:
    """Ordinary, non-private training."""
    model, x, y = workload.make(device)
    return _loop(model, torch.optim.SGD(model.parameters(), lr=0.1), _forever(x, y))


def vestige(
    clipping: str,
    method: Callable[[Workload], Method] = lambda _: DPSGD(),
    copies: int = 1,
    **options: Any,
) -> Callable[[Workload, str], Iterator[None]]:
    """Vestige; a sampling rate of 1 makes every lot the same size.

    With `copies` of the lot as data, for methods whose groups take turns, lots vary a little.
    """

    def make(workload: Workload, device: str) -> Iterator[None]:
        model, x, y = workload.make(device)
        chosen = method(workload)
        x, y = x.repeat(copies, 1, 1, 1), y.repeat(copies)
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=chosen.make_optimizer(model.parameters(), lr=0.1),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=workload.lot),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping=clipping,
            method=chosen,
            **options,
        )

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        loop = _closure_loop if chosen.needs_closure else _loop
        return loop(model, optimizer, batches())

    return make


def opacus(mode: str) -> Callable[[Workload, str], Iterator[None]]:
    """Opacus in one of its modes, on the same fixed batch."""

    def make(workload: Workload, device: str) -> Iterator[None]:
        from opacus import PrivacyEngine as OpacusEngine

        model, x, y = workload.make(device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        parameters = len(list(model.parameters()))
        options: dict[str, Any] = {
            "hooks flat": {},
            "hooks per-layer": {
                "clipping": "per_layer",
                "max_grad_norm": [parameters**-0.5] * parameters,
            },
            "ghost": {"grad_sample_mode": "ghost", "criterion": nn.CrossEntropyLoss()},
        }[mode]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made = OpacusEngine(accountant="rdp").make_private(
                module=model,
                optimizer=optimizer,
                data_loader=DataLoader(TensorDataset(x, y), batch_size=workload.lot),
                poisson_sampling=False,
                noise_multiplier=1.0,
                **{"max_grad_norm": 1.0, **options},
            )
        criterion = made[2] if len(made) == 4 else None
        return _loop(made[0], made[1], _forever(x, y), criterion)

    return make


def _sma(workload: Workload) -> Method:
    """Exponents at every step, for ResNet-18 at every tenth."""
    return SMA(window=8, refresh=10 if workload.model == "resnet18" else 1)


# Methods that only do something else with a release.
UPDATES = ("dp-adam", "dp-adambc", "dp-sat", "disk", "doppler", "kalman")
# Methods that evaluate a batch twice.
TWICE: dict[str, Method] = {
    "dp-sam": DPSAM(),
    "dp-sam-per-example": DPSAMPerExample(),
    "disk, two points": Disk(ahead=0.5),
}
BANDS = 8

# The DP-SGD step that a method is compared with: the one with the same clipping.
SAME_CLIPPING = {
    **{f"vestige {name}": "vestige flat" for name in (*UPDATES, *TWICE, "quantile")},
    "vestige fractional-noise": "vestige flat, 8 lots of data",
    **{f"vestige banded-inverse {b}": "vestige flat, 8 lots of data" for b in (8, 16)},
    "vestige fo": "vestige flat",
    "vestige fo, bf16 history": "vestige flat",
    "vestige sma": "vestige per-layer",
}

ENGINES: dict[str, Callable[[Workload, str], Iterator[None]]] = {
    "plain": plain,
    "vestige per-layer": vestige("per_layer"),
    "vestige flat": vestige("flat"),
    "vestige fo": vestige("flat", lambda _: FO(window=8)),
    "vestige fo, bf16 history": vestige(
        "flat", lambda _: FO(window=8), history_dtype=torch.bfloat16
    ),
    "vestige sma": vestige("per_layer", _sma),
    **{
        f"vestige {name}": vestige("flat", lambda _, name=name: METHODS[name]())  # type: ignore[misc]
        for name in UPDATES
    },
    **{
        f"vestige {name}": vestige("flat", lambda _, chosen=chosen: chosen)  # type: ignore[misc]
        for name, chosen in TWICE.items()
    },
    "vestige quantile": vestige("quantile"),
    "vestige flat, 8 lots of data": vestige("flat", copies=BANDS),
    "vestige fractional-noise": vestige(
        "flat", lambda _: FractionalNoise(bands=BANDS), copies=BANDS, steps=10_000
    ),
    **{
        f"vestige banded-inverse {bands}": vestige(
            "flat",
            lambda _, bands=bands: BandedInverse(bands=bands),  # type: ignore[misc]
            copies=BANDS,
            steps=10_000,
        )
        for bands in (8, 16)
    },
    "opacus hooks flat": opacus("hooks flat"),
    "opacus hooks per-layer": opacus("hooks per-layer"),
    "opacus ghost": opacus("ghost"),
}
