"""Rows that are attributed to the wrong record: what it costs, and that the audit sees it.

The engine is broken on purpose: it reads rows batch-major, whatever their order is, which was once
a fault of this library. The attack knows nothing of that. It takes two neighbouring data sets (one
loud record among quiet ones), the direction q(D) - q(D') of their clipped sums without noise, and
asks of each noisy release on which side of the middle it lies. A trial is a whole run of the
engine, one release at a sampling rate of 1, with the loud record or without it by a fair coin.

Guarantee: the bound is Clopper and Pearson's on the error rates, free of assumptions.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any
from unittest import mock

import numpy as np
from torch import Tensor
from torch.utils.data import TensorDataset

from vestige.audit.attack.training import CLIP, Target, attack, coins
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult, judge
from vestige.audit.verify.rows import losses, made, records
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.gradients.rows import Rows

BROKEN, WHOLE = "mis-attributed rows", "the same, rows as they are"
NOISE, TRIALS, POSITIONS = 8.0, 400, 32


def batch_major(self: Rows, value: Tensor) -> Tensor:
    """In place of `Rows.first`: as if the entries of a record always followed each other."""
    if self.batch == 1:
        return value if value.ndim and value.shape[0] == 1 else value.unsqueeze(0)
    place = self.place(value.shape)
    assert place is not None
    axis, _ = place
    value = value.unflatten(axis, (self.batch, -1)).movedim(axis, 0)
    return value.squeeze(axis + 1) if value.shape[axis + 1] == 1 else value


def misread() -> AbstractContextManager[Any]:
    """The engine with its rows read batch-major."""
    return mock.patch.object(Rows, "first", batch_major)


def audit_rows(
    broken: bool, *, noise_multiplier: float = NOISE, trials: int = TRIALS, seed: int | None = None
) -> AuditResult:
    """Attack a time-major token model on the broken engine, or on the engine as it is."""
    begun = time.perf_counter()
    options = AuditOptions(
        method="dp-sgd", noise_multiplier=noise_multiplier, steps=1, trials=trials, seed=seed
    )
    data = records(POSITIONS)
    others = TensorDataset(*(tensor[1:] for tensor in data.tensors))

    def release(inside: bool, noise: float, run: int) -> tuple[Tensor, PrivacyEngine]:
        target = Target(
            made("time-major"),
            data if inside else others,
            losses,
            len(others),
            len(others),
        )
        checked = not broken and run == 0
        attacked = attack(options, target, noise, run=run, self_check=checked)
        return attacked.recording.sums[0].values.double(), attacked.engine

    with misread() if broken else nullcontext():
        without, _ = release(False, 0.0, trials)
        direction = release(True, 0.0, trials)[0] - without
        ratio = float(direction.norm()) / CLIP
        member = coins(options).random(trials) < 0.5
        scores = np.zeros(trials)
        for trial, inside in enumerate(member):
            seen, engine = release(bool(inside), noise_multiplier, trial)
            scores[trial] = float((seen - without) @ direction) / ratio
    result = judge(
        options,
        engine,
        scores,
        member,
        method=BROKEN if broken else WHOLE,
        mode="rows",
        noise_multiplier=noise_multiplier,
        sample_rate=1.0,
        notes=(f"one record moves the clipped sum by {ratio:.4g} C",),
    )
    return replace(result, seconds=time.perf_counter() - begun)
