"""Canaries for releases of angles: the box form of GeoDP.

One example moves every angle by at most w = bounding pi / 2 (the last by 2 w), so a worst case has
to move all of them: a single coordinate would use 1 / sqrt(P) of the bound. Canary i asks for the
angles pi/2 + a h_z, with h the i-th row of a Hadamard matrix and a well beyond w: whatever the
reference (near pi/2 in all but the last angles), its deviations are clipped to w h_z. Rows of the
matrix are orthogonal, so canaries saturate the bound and are orthogonal as elsewhere: the
projections of the noise on different rows are independent.

Coordinates of such a gradient fall by cos(a) from one to the next, so a run has 512 canaries at
most and an audit several runs, each with a coin for every canary. Records with a gradient of zero
fill the data up: the expected lot, which divides the release, keeps the reference from drifting.
As in directions.py the auditor subtracts what other canaries do, and the length is not attacked.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack import Attacked, as_numpy, attack, coins, inclusion
from vestige.audit.canaries import SATURATION
from vestige.audit.setting import Setting
from vestige.geometry import to_cartesian

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]

PER_RUN = 512
FILLERS = 6000
_WIDE = 0.6  # a: beyond bounding pi/2 for boundings up to about 0.3


class AngleModel(nn.Module):
    """One weight for every coordinate; record number n has the n-th row of `table` as gradient."""

    table: Tensor

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.register_buffer("table", table)
        self.linear = nn.Linear(table.shape[1], 1, bias=False, dtype=table.dtype)
        nn.init.zeros_(self.linear.weight)

    def forward(self, numbers: Tensor) -> Tensor:
        """The product of each record with the weights."""
        out: Tensor = self.linear(self.table[numbers]).squeeze(1)
        return out


def signs() -> Array:
    """The rows of the Hadamard matrix."""
    from scipy.linalg import hadamard

    return np.asarray(hadamard(PER_RUN), dtype=np.float64)


def records() -> int:
    """The declared size of the data of one run."""
    return FILLERS + PER_RUN // 2


def run_angles(
    setting: Setting, noise: float, run: int, count: int, tell: Callable[[int], None]
) -> tuple[Attacked, Array, Array, Flags, Flags]:
    """One run with `count` canaries: readings, mu, who is in the data, who is in which lot."""
    rows = signs()
    wanted = np.concatenate([math.pi / 2 + _WIDE * rows, np.zeros((PER_RUN, 1))], axis=1)
    length = torch.full((PER_RUN,), SATURATION, dtype=torch.float64)
    gradients = to_cartesian(length, torch.from_numpy(wanted))
    table = torch.cat([gradients.new_zeros(1, gradients.shape[1]), gradients])
    member = coins(setting, run).random(count) < 0.5
    numbers = torch.from_numpy(np.flatnonzero(member) + 1)
    numbers = torch.cat([torch.zeros(FILLERS, dtype=torch.int64), numbers])
    found = attack(
        setting,
        AngleModel(table),
        TensorDataset(numbers, (numbers > 0).double()),
        setting.batch_size(records()),
        noise,
        lambda model, numbers, weights: weights * model(numbers),
        declared=records(),
        run=run,
        tell=tell,
    )
    inside = inclusion(found.lots, PER_RUN)
    read, mu = _readings(found, rows, wanted[:, :-1], inside)
    return found, read[:, :count], mu, member, inside[:, :count]


def _readings(attacked: Attacked, rows: Array, wanted: Array, inside: Flags) -> tuple[Array, Array]:
    """Projections of the released deviations on every canary's signs, less the other canaries."""
    read, shifts = [], []
    steps = zip(attacked.transcript.looks, inside, attacked.references, strict=True)
    for looks, present, reference in steps:
        look, phi = looks[0], as_numpy(reference)[:PER_RUN]
        limit, std = look.bounds[0] / math.sqrt(PER_RUN + 4), look.stds[0]
        moves = np.clip(wanted - phi, -limit, limit)
        left = as_numpy(look.values)[:PER_RUN] - moves[present].sum(axis=0)
        own = np.where(present, (moves * rows).sum(axis=1), 0.0)
        read.append((rows @ left + own) / math.sqrt(PER_RUN) / std)
        shifts.append(limit * math.sqrt(PER_RUN) / std)
    return np.array(read), np.array(shifts)
