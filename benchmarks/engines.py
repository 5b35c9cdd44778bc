"""One training step of every engine on a workload: ordinary, Vestige in its ways, Opacus.

An engine is built for a workload and a device and gives a loop that pauses before and after every
step; lots are drawn while it is not timed.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.workloads import Workload
from vestige import FlipAndCrop, PrivacyEngine
from vestige.methods import (
    DPSAM,
    DPSGD,
    FO,
    SMA,
    BandedInverse,
    Disk,
    DPSAMPerExample,
    FractionalNoise,
    Method,
    resolve,
)

Loop = Iterator[None]
Build = Callable[[Workload, str], Loop]
PLAIN, FLAT, PER_LAYER = "plain", "vestige flat", "vestige per-layer"
GROUP, THOROUGH = f"{FLAT}, a group of one", f"{FLAT}, a group of one as of several"


@dataclass(frozen=True)
class Engine:
    """How it is built, and the engine that it is compared with beside the ordinary one.

    `warm_up` steps come first: a memory must be full before a step costs what it will cost.
    """

    build: Build
    base: str | None = None
    warm_up: int = 3


def _cross_entropy(output: Tensor, labels: Tensor) -> Tensor:
    """Of the classes of images, or of the words at every position of a text."""
    return F.cross_entropy(output.flatten(0, -2), labels.flatten())


def _loop(
    workload: Workload,
    device: str,
    model: nn.Module,
    optimizer: Any,
    batches: Iterator[Any],
    criterion: Any = _cross_entropy,
) -> Loop:
    """An ordinary training loop."""
    for x, y in batches:
        yield
        optimizer.zero_grad()
        with workload.autocast(device):
            loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
        yield


def _closure_loop(
    workload: Workload, device: str, model: nn.Module, optimizer: Any, batches: Iterator[Any]
) -> Loop:
    """The same with optimizer.step(closure), for methods that evaluate a batch twice."""
    for x, y in batches:
        yield

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            with workload.autocast(device):
                loss = _cross_entropy(model(x), y)
            loss.backward()
            return loss

        optimizer.step(closure)
        yield


def _forever(x: Tensor, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    while True:
        yield x, y


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.01)


def plain(compiled: bool = False) -> Build:
    """Ordinary, non-private training, also under torch.compile."""

    def make(workload: Workload, device: str) -> Loop:
        model, x, y = workload.make(device)
        optimizer = _sgd(model)
        run: Any = torch.compile(model) if compiled else model
        return _loop(workload, device, run, optimizer, _forever(x, y))

    return make


def vestige(
    clipping: str,
    method: Callable[[Workload], Method] = lambda _: DPSGD(),
    copies: int = 1,
    groups: int | None = None,
    thorough: bool = False,
    **options: Any,
) -> Build:
    """Vestige; a sampling rate of 1 makes every lot the same size.

    With `copies` of the lot as data, for methods whose groups take turns, lots vary a little. With
    `views` a lot has so many times fewer records, and as many rows. `groups` clips so many parts of
    the model, one after the other, each for itself. `thorough`: a group of one works as several do.
    """

    def make(workload: Workload, device: str) -> Loop:
        model, x, y = workload.make(device)
        chosen = method(workload)
        records = workload.lot // options.get("views", 1)
        x, y = (v[:records].repeat(copies, *[1] * (v.ndim - 1)) for v in (x, y))
        engine = PrivacyEngine(accountant="rdp")
        model, optimizer, loader = engine.make_private(
            module=model,
            optimizer=chosen.make_optimizer(
                [p for p in model.parameters() if p.requires_grad], lr=0.01
            ),
            data_loader=DataLoader(TensorDataset(x, y), batch_size=records),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
            clipping=clipping if groups is None else _parts(model, groups),
            method=chosen,
            **options,
        )
        engine.ranks.thorough = thorough

        def batches() -> Iterator[Any]:
            while True:
                yield from loader

        loop = _closure_loop if chosen.needs_closure else _loop
        return loop(workload, device, model, optimizer, batches())

    return make


def _parts(model: nn.Module, count: int) -> list[list[str]]:
    """The trained parameters in their order, dealt out to `count` groups."""
    names = [name for name, p in model.named_parameters() if p.requires_grad]
    each = -(-len(names) // count)
    return [names[at : at + each] for at in range(0, len(names), each)]


def in_a_group(build: Build) -> Build:
    """The same in a process group of this process alone; engines without one are built before."""

    def make(workload: Workload, device: str) -> Loop:
        if not dist.is_initialized():
            join("gloo" if device == "cpu" else "nccl")
        return build(workload, device)

    return make


def join(backend: str) -> None:
    """A group of one: torchrun's, or this process's own."""
    if dist.is_torchelastic_launched():
        dist.init_process_group(backend)
    else:
        meeting = f"file://{tempfile.mkdtemp()}/meeting"
        dist.init_process_group(backend, meeting, rank=0, world_size=1)


def leave() -> None:
    """Out of the group that an engine has made, if there is one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def opacus(mode: str) -> Build:
    """Opacus in one of its modes, on the same fixed batch."""

    def make(workload: Workload, device: str) -> Loop:
        from opacus import PrivacyEngine as OpacusEngine

        model, x, y = workload.make(device)
        optimizer = _sgd(model)
        parameters = len([p for p in model.parameters() if p.requires_grad])
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
        criterion = made[2] if len(made) == 4 else _cross_entropy
        return _loop(workload, device, made[0], made[1], _forever(x, y), criterion)

    return make


def _sma(workload: Workload) -> Method:
    """Exponents at every step, for large models at every tenth."""
    return SMA(window=8, refresh=1 if workload.model in ("mlp", "cnn") else 10)


def fo(window: int) -> Callable[[Workload], Method]:
    """FO with so many past releases."""
    return lambda _: FO(window=window)


# Methods that only do something else with a release.
UPDATES = ("dp-adam", "dp-adambc", "dp-sat", "disk", "doppler", "kalman")
# Methods that evaluate a batch twice.
TWICE: dict[str, Method] = {
    "dp-sam": DPSAM(),
    "dp-sam-per-example": DPSAMPerExample(),
    "disk, two points": Disk(ahead=0.5),
}
BANDS = 8
TURNS = f"{FLAT}, {BANDS} lots of data"

ENGINES: dict[str, Engine] = {
    PLAIN: Engine(plain()),
    "plain, compiled": Engine(plain(compiled=True)),
    PER_LAYER: Engine(vestige("per_layer")),
    FLAT: Engine(vestige("flat")),
    f"{PER_LAYER}, compiled": Engine(vestige("per_layer", compile=True), "plain, compiled"),
    f"{FLAT}, compiled": Engine(vestige("flat", compile=True), "plain, compiled"),
    "vestige fo": Engine(vestige("flat", fo(8)), FLAT, 10),
    "vestige fo, bf16 history": Engine(
        vestige("flat", fo(8), history_dtype=torch.bfloat16), FLAT, 10
    ),
    "vestige sma": Engine(vestige("per_layer", _sma), PER_LAYER, 10),
    **{
        f"vestige fo, window {window}": Engine(vestige("flat", fo(window)), FLAT, window + 2)
        for window in (2, 16, 64)
    },
    **{
        f"vestige flat, {groups} groups": Engine(vestige("flat", groups=groups), FLAT)
        for groups in (2, 4, 16)
    },
    **{
        name: Engine(vestige("flat", augment=FlipAndCrop(4), views=views), base)
        for name, views, base in (
            ("vestige flat, 1 view", 1, None),
            ("vestige flat, 16 views", 16, "vestige flat, 1 view"),
        )
    },
    GROUP: Engine(in_a_group(vestige("flat")), FLAT),
    THOROUGH: Engine(in_a_group(vestige("flat", thorough=True)), FLAT),
    "vestige flat, no self-check": Engine(vestige("flat", self_check=False)),
    **{
        f"vestige {name}": Engine(vestige("flat", lambda _, name=name: resolve(name)), FLAT)  # type: ignore[misc]
        for name in UPDATES
    },
    **{
        f"vestige {name}": Engine(vestige("flat", lambda _, chosen=chosen: chosen), FLAT)  # type: ignore[misc]
        for name, chosen in TWICE.items()
    },
    "vestige quantile": Engine(vestige("quantile"), FLAT),
    TURNS: Engine(vestige("flat", copies=BANDS)),
    "vestige fractional-noise": Engine(
        vestige("flat", lambda _: FractionalNoise(bands=BANDS), copies=BANDS, steps=10_000), TURNS
    ),
    **{
        f"vestige banded-inverse {bands}": Engine(
            vestige(
                "flat",
                lambda _, bands=bands: BandedInverse(bands=bands),  # type: ignore[misc]
                copies=BANDS,
                steps=10_000,
            ),
            TURNS,
        )
        for bands in (8, 16)
    },
    "opacus hooks flat": Engine(opacus("hooks flat")),
    "opacus hooks per-layer": Engine(opacus("hooks per-layer")),
    "opacus ghost": Engine(opacus("ghost")),
}
