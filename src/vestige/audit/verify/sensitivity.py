"""How far one record moves the clipped sum: `sensitivity(model, dataset, losses)`.

The real engine runs on all records and on all but one, with noise off and a sampling rate of 1, so
that what leaves the door is the clipped sum q itself, and R = |q(D) - q(D')| / C in every clipping
group and jointly. The noise is made for R <= 1: a larger R is a counterexample to the claim.

Guarantee: none, and the figures are exact functions of the records: run it on public or made-up
ones. R <= 1 says that these records, at these weights, did not break the bound.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, Subset

from vestige.audit.tape import Recording, Tape
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError

SLACK = 1 + 1e-5  # of the sums' rounding in float32
_REPEATABLE = 1e-4  # how far apart two sums of the same records may be, in units of the bound
_FIXED = ("dataset_size", "method", "noise_multiplier", "sample_rate")

Losses = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to one loss per row, or to one number as `loss_reduction` says."""


@dataclass(frozen=True)
class Moved:
    """What one record moved: the whole clipped sum and each group, in units of their bounds."""

    record: int
    joint: float
    groups: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """The largest of them: R, at most 1 if the bound holds."""
        return max(self.joint, *self.groups)

    @property
    def within(self) -> bool:
        """Whether the bound held, up to rounding."""
        return self.ratio <= SLACK


def sensitivity(
    module: nn.Module,
    dataset: Dataset[Any],
    losses: Losses,
    *,
    records: Iterable[int] | None = None,
    max_grad_norm: float = 1.0,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    **options: Any,
) -> list[Moved]:
    """How far each of `records` (all, if left out) moves the clipped sum; the farthest first.

    `module` is copied and stays as it is. `losses(model, batch)` gives one loss per row, or one
    number. `options` go to `make_private`: clipping, loss_reduction, batch_first, ... The method is
    DP-SGD: gradients are taken in the same way for all of them. A model that the engine refuses
    raises, as it would in training; so does one that draws random numbers, whose sums differ for
    another reason than a record.

    Guarantee: none (see the module). The results are about the records and have no noise.
    """
    size = len(dataset)  # type: ignore[arg-type]
    everybody = list(range(size))
    chosen = everybody if records is None else list(records)
    for record in chosen:
        if not 0 <= record < size:
            raise ConfigError(
                f"records has {record}, and the data has {size}: use numbers from 0 to {size - 1}."
            )
    for name in _FIXED:
        if name in options:
            raise ConfigError(
                f"{name} cannot be chosen here: R is measured on plain sums of all rows."
            )
    if size < 2:
        raise ConfigError(
            f"the data has {size} records: give at least 2, one of them to leave out."
        )
    options |= {"max_grad_norm": max_grad_norm, "dataset_size": size - 1}

    def total(kept: list[int]) -> Recording:
        loader = DataLoader(Subset(dataset, kept), batch_size=size - 1, collate_fn=collate_fn)
        return _clipped_sum(module, loader, losses, options)

    whole = total(everybody)
    apart = max(_apart(whole, total(everybody)))
    if apart > _REPEATABLE:
        raise ConfigError(
            f"two sums of the same records are {apart:.3g} times the bound apart: the model draws "
            "random numbers. Switch them off (model.eval(), or dropout 0) and measure again."
        )
    moved = []
    for record in chosen:
        joint, *groups = _apart(whole, total([i for i in everybody if i != record]))
        moved.append(Moved(record, joint, tuple(groups)))
    return sorted(moved, key=lambda one: -one.ratio)


def _apart(one: Recording, other: Recording) -> list[float]:
    """The distance of two sums in units of the bounds: jointly, then in every group."""
    difference = one.looks[0].values.double() - other.looks[0].values.double()
    bounds = one.looks[0].bounds
    groups = [
        float(difference[segment].norm()) / bound
        for segment, bound in zip(one.segments, bounds, strict=True)
    ]
    return [float(difference.norm()) / math.hypot(*bounds), *groups]


def _clipped_sum(
    module: nn.Module, data: DataLoader[Any], losses: Losses, options: dict[str, Any]
) -> Recording:
    """The first lot of a run without noise that takes all records."""
    model = copy.deepcopy(module)
    engine = PrivacyEngine()
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.0),
        data_loader=data,
        noise_multiplier=0.0,
        sample_rate=1.0,
        **options,
    )
    try:
        with Tape(engine, sums=False) as tape:
            for batch in loader:
                loss = losses(model, batch)
                if loss.ndim:
                    engine.backward(loss)
                else:
                    loss.backward()
                optimizer.step()
                if tape.seen.looks:  # a lot may come in several physical batches
                    break
        return tape.seen
    finally:
        engine.detach()
