"""One run of the real engine on canaries: its loader, its loop, and what came out of its door."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige.audit.setting import Setting
from vestige.audit.transcript import Transcript, listening
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.updates.decoding import Decoding

Tell = Callable[[str, int, int], None]
"""Progress: what is done, how many steps of it, of how many."""

CLIP = 1.0


@dataclass
class Attacked:
    """A finished run: the engine, its transcript, and the canaries' numbers in every lot."""

    engine: PrivacyEngine
    transcript: Transcript
    lots: list[npt.NDArray[np.int64]] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)  # of methods with a geometry: public


def noise_seed(setting: Setting, run: int = 0) -> int | None:
    """The engine's seed of a run: the auditor's in test mode, nothing otherwise."""
    return None if setting.seed is None else setting.seed + 1_000_003 * run


def coins(setting: Setting, run: int = 0) -> np.random.Generator:
    """The auditor's own coins: who is in the data. Not the engine's."""
    fresh = secrets.randbits(128) if setting.seed is None else abs(setting.seed)
    return np.random.default_rng([run, fresh])


def attack(
    setting: Setting,
    model: nn.Module,
    dataset: TensorDataset,
    batch_size: int,
    noise: float,
    losses: Callable[[nn.Module, Tensor, Tensor], Tensor],
    *,
    declared: int | None = None,
    run: int = 0,
    self_check: bool = True,
    tell: Callable[[int], None] = lambda step: None,
) -> Attacked:
    """Train `model` on `dataset` with the method, as any user would, and listen at the door.

    `dataset` holds numbers (or inputs) and weights of records; `losses` gives one loss for each
    row. `declared` is the public size of the data.
    """
    method, steps = setting.method, setting.steps
    engine = PrivacyEngine(noise_seed=noise_seed(setting, run))
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=method.make_optimizer(model.parameters(), lr=method.info.default_lr),
        data_loader=DataLoader(dataset, batch_size=batch_size),
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        clipping=setting.clipping,
        method=method,
        dataset_size=declared,
        steps=steps,
        self_check=self_check,
    )
    decoding = engine._attached().part(Decoding)
    geometry = decoding.geometry if decoding else None
    with listening(engine) as transcript:
        found = Attacked(engine, transcript)
        while engine.released < steps:
            for numbers, weights in loader:

                def closure(numbers: Tensor = numbers, weights: Tensor = weights) -> Tensor:
                    optimizer.zero_grad()
                    each = losses(model, numbers, weights)
                    engine.backward(each)
                    return each.detach().sum()

                if geometry is not None:
                    reference = geometry._reference.clone()
                before = engine.released
                optimizer.step(closure)  # type: ignore[arg-type]
                if engine.released > before:  # not on the batches that only measure
                    found.lots.append(numbers.numpy())
                    if geometry is not None:
                        found.references.append(reference)
                    tell(engine.released)
                if engine.released == steps:
                    break
    engine.detach()
    return found


def inclusion(lots: list[npt.NDArray[np.int64]], canaries: int) -> npt.NDArray[np.bool_]:
    """Which canary was in which lot, (steps, canaries), from the numbers that begin at 1."""
    inside = np.zeros((len(lots), canaries + 1), dtype=np.bool_)
    for row, numbers in zip(inside, lots, strict=True):
        row[numbers] = True
    return inside[:, 1:]


def as_numpy(values: Tensor) -> npt.NDArray[np.float64]:
    """A copy in float64."""
    found: npt.NDArray[np.float64] = values.detach().to(torch.float64).numpy()
    return found
