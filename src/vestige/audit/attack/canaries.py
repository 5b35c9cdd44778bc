"""Canaries: records whose gradients are worst cases for every clip bound, and reading them.

    loss of record i = weight_i * sum over layers l of  k * W_l[i]

The gradient of record i is the same at all weights: k, far beyond every bound, in the i-th number
of every layer and zero elsewhere. Layers are matrices, so that methods that look at spectra have
something to look at. Number 0 belongs to nobody: an empty lot is a row of zeros.

A reading is one number for each canary and step, N(b * mu, 1), b saying if it was in. In layer l,
clipped in group g, a canary that is in the lot moves its own coordinate by

    d_l = gain * C_g / sqrt(layers of g)

and the noise there has standard deviation s_g. The best statistic of its coordinates in all layers
and all looks at the lot is sum_l d_l y_l / s_g^2, over its own standard deviation; mu = sqrt(sum_l
d_l^2 / s_g^2). docs/audit.md says why different readings are independent.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack.training import CLIP, Attacked, Target, as_numpy
from vestige.audit.bounds import Array, Flags
from vestige.audit.options import AuditOptions
from vestige.audit.tape import Look
from vestige.gradients.groups import Groups

SATURATION = 1e4  # k over the bound C: quantile clipping may raise the bound during the run
_zero = torch.zeros(())


class CanaryModel(nn.Module):
    """`layers` matrices with a number for every canary in each."""

    def __init__(self, canaries: int, layers: int) -> None:
        super().__init__()
        self.columns = math.isqrt(canaries) + 1
        rows = -(-(canaries + 1) // self.columns)
        made = [nn.Embedding(rows, self.columns) for _ in range(layers)]
        generator = torch.Generator().manual_seed(0)  # public
        for layer in made:
            with torch.no_grad():
                layer.weight.normal_(std=0.1, generator=generator)
        self.layers = nn.ModuleList(made)

    def forward(self, numbers: Tensor) -> Tensor:
        """The sum over the layers of each record's own number."""
        row, column = numbers // self.columns, (numbers % self.columns).unsqueeze(1)
        return sum((layer(row).gather(1, column).squeeze(1) for layer in self.layers), _zero)


def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """The linear loss of canaries, far beyond the clip bound."""
    numbers, weights = batch
    each: Tensor = weights * (SATURATION * CLIP) * model(numbers)
    return each


@dataclass(frozen=True)
class Canaries:
    """Who is in the data: a fair coin for each canary, known to the auditor.

    With `zeroed` all of them are in the data and those that are out have weight zero: the adjacency
    of methods with a fixed order.
    """

    member: Flags
    zeroed: bool = False

    @classmethod
    def tossed(cls, count: int, coins: np.random.Generator, zeroed: bool) -> Canaries:
        """A fair coin for each of `count` canaries."""
        return cls(coins.random(count) < 0.5, zeroed)

    @property
    def count(self) -> int:
        """The number of canaries, in or out."""
        return len(self.member)

    def dataset(self, rows: Tensor) -> TensorDataset:
        """Of the canaries' rows those that are in the data, and their weights."""
        weights = torch.from_numpy(self.member.astype(np.float32))
        chosen = torch.from_numpy(self.member | self.zeroed)
        return TensorDataset(rows[chosen], weights[chosen])

    def target(self, options: AuditOptions) -> Target:
        """What to train so that these canaries are attacked; their numbers begin at 1."""
        model, batch = CanaryModel(self.count, options.layers), options.batch_size(options.records)
        data = self.dataset(torch.arange(1, self.count + 1))
        return Target(model, data, loss, batch, options.declared)


@dataclass(frozen=True)
class Readings:
    """`numbers` (steps, canaries), N(inside * mu, 1), with mu (steps,); who is in the data."""

    numbers: Array
    mu: Array
    member: Flags
    inside: Flags

    @classmethod
    def joined(cls, parts: Sequence[Readings]) -> Readings:
        """The readings of several runs with the same mu, whose canaries are different ones."""
        numbers, member, inside = (
            np.concatenate([getattr(part, name) for part in parts], axis=-1)
            for name in ("numbers", "member", "inside")
        )
        return cls(numbers, parts[-1].mu, member, inside)


def readings(attacked: Attacked, canaries: int) -> tuple[Array, Array]:
    """The readings (steps, canaries) and the claimed mu (steps,) of a run on `CanaryModel`."""
    groups = attacked.engine.door.groups
    pairs = [_reading(looks, groups, canaries) for looks in attacked.recording.by_lot]
    return np.array([reading for reading, _ in pairs]), np.array([mu for _, mu in pairs])


def standardised(attacked: Attacked, canaries: int, noise: float) -> tuple[Array, float]:
    """The readings in units of the noise before it is correlated, and their mu, which is constant.

    `noise` is the joint multiplier: the noise has one standard deviation in all groups.
    """
    groups, pairs = attacked.engine.door.groups, []
    for look in attacked.recording.sums:
        std = noise * float(np.linalg.norm(look.bounds))
        plain = replace(look, stds=(std,) * len(look.bounds))
        pairs.append(_reading([plain], groups, canaries))
    return np.array([reading for reading, _ in pairs]), pairs[0][1]


def _reading(looks: Sequence[Look], groups: Groups, canaries: int) -> tuple[Array, float]:
    total, square = np.zeros(canaries), 0.0
    layers = [sum(slot.group == g for slot in groups.slots) for g in range(groups.count)]
    for look in looks:
        values = as_numpy(look.without_branch)
        for slot in groups.slots:
            moved = look.gain * look.bounds[slot.group] / layers[slot.group] ** 0.5
            std = look.stds[slot.group]
            own = values[slot.start + 1 : slot.start + 1 + canaries]  # number 0 is nobody's
            total += moved / std**2 * own
            square += (moved / std) ** 2
    return total / square**0.5, square**0.5


def membership_scores(read: Array, mu: Array, rates: Array) -> Array:
    """The log-likelihood ratio of "in the data" over all steps, for each canary.

    In lot t with probability rate_t:  sum_t log(1 - rate_t + rate_t exp(mu_t v_t - mu_t^2 / 2)).
    """
    exponent = mu[:, None] * read - mu[:, None] ** 2 / 2
    rate = np.clip(rates, 0.0, 1.0)[:, None]
    with np.errstate(divide="ignore"):
        each = np.logaddexp(np.log1p(-rate), np.log(rate) + exponent)
    scores: Array = each.sum(axis=0)
    return scores
