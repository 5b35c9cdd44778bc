"""One run of the real engine on canaries, and what came out of its door."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from vestige.audit.bounds import Array, Flags
from vestige.audit.loop import Loop
from vestige.audit.options import AuditOptions
from vestige.audit.tape import Recording, Tape
from vestige.engine.privacy_engine import PrivacyEngine

Tell = Callable[[str, int, int], None]
"""Progress: what is done, how many steps of it, of how many."""

CLIP = 1.0


@dataclass(frozen=True)
class Target:
    """What is trained: `losses(model, batch)` gives one loss for each row of a batch of `dataset`.

    `declared` is the public size of the data; None lets the engine count.
    """

    model: nn.Module
    dataset: TensorDataset
    losses: Callable[[nn.Module, Any], Tensor]
    batch_size: int
    declared: int | None = None


@dataclass
class Attacked:
    """A finished run: the engine, its releases, and the canaries' numbers in every lot."""

    engine: PrivacyEngine
    recording: Recording
    lots: list[np.typing.NDArray[np.int64]] = field(default_factory=list)
    references: list[Tensor] = field(default_factory=list)  # of methods with a geometry: public


def coins(options: AuditOptions, run: int = 0) -> np.random.Generator:
    """The auditor's own coins: who is in the data. Not the engine's."""
    fresh = secrets.randbits(128) if options.seed is None else abs(options.seed)
    return np.random.default_rng([run, fresh])


def attack(
    options: AuditOptions,
    target: Target,
    noise: float,
    *,
    run: int = 0,
    self_check: bool = True,
    tell: Callable[[int], None] = lambda step: None,
) -> Attacked:
    """Train the target with the method, as any user would, and listen at the door.

    Runs of one audit have numbers and, in test mode, a seed each.
    """
    method, model = options.chosen, target.model
    seed = None if options.seed is None else options.seed + 1_000_003 * run
    engine = PrivacyEngine(noise_seed=seed)
    made = engine.make_private(
        module=model,
        optimizer=method.make_optimizer(model.parameters(), lr=method.info.default_lr),
        data_loader=DataLoader(target.dataset, batch_size=target.batch_size),
        noise_multiplier=noise,
        max_grad_norm=CLIP,
        clipping=options.form,
        method=method,
        dataset_size=target.declared,
        steps=options.length,
        self_check=self_check,
    )
    turning = method.geometry(torch.zeros(4)) is not None
    with Tape(engine, sums=False) as tape:
        attacked = Attacked(engine, tape.seen, references=[_reference(engine)] if turning else [])
        for batch in Loop(engine, target.losses, *made).steps(options.length):
            if engine.released > len(attacked.lots):  # not on the batches that only measure
                attacked.lots.append(batch[0].numpy())
                if turning:
                    attacked.references.append(_reference(engine))
                tell(engine.released)
    del attacked.references[len(attacked.lots) :]  # that of a lot which never came
    engine.detach()
    return attacked


def _reference(engine: PrivacyEngine) -> Tensor:
    """The direction that the coming release is measured from: a function of releases."""
    reference: Tensor = engine.state_dict()["geometry"]["reference"]
    return reference


def inclusion(lots: list[np.typing.NDArray[np.int64]], canaries: int) -> Flags:
    """Which canary was in which lot, (steps, canaries), from the numbers that begin at 1."""
    inside = np.zeros((len(lots), canaries + 1), dtype=np.bool_)
    for row, numbers in zip(inside, lots, strict=True):
        row[numbers] = True
    return inside[:, 1:]


def as_numpy(values: Tensor) -> Array:
    """A copy in float64."""
    copied: Array = values.detach().to(torch.float64).numpy()
    return copied
