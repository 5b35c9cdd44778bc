"""Reading releases of directions and angles: the two private forms of GeoDP.

Tangent. A canary e_i turns the public reference u by x_i = min(angle, R) (e_i - u_i u) /
sqrt(1 - u_i^2). Its own coordinate of the release moves by nearly R, and it also touches the
others' coordinates, by about R / P. The auditor knows u and the other canaries of the lot, so it
subtracts what they do; what is left in coordinate i is b * min(angle, R) * sqrt(1 - u_i^2) plus the
noise of that coordinate, and different canaries are independent again.

Box. One example moves every angle by at most w = bounding pi / 2 (the last by 2 w), so a worst case
has to move all of them: a single coordinate would use 1 / sqrt(P) of the bound. Canary i asks for
the angles pi/2 + a h_z, with h the i-th row of a Hadamard matrix and a well beyond w: whatever the
reference (near pi/2 in all but the last angles), its deviations are clipped to w h_z. Rows of the
matrix are orthogonal, so canaries saturate the bound and are orthogonal as elsewhere: the
projections of the noise on different rows are independent.

Coordinates of such a gradient fall by cos(a) from one to the next, so a run has 512 canaries at
most and an audit several runs, each with a coin for every canary. Records with a gradient of zero
fill the data up: the expected lot, which divides the release, keeps the reference from drifting.

The release's last number, the sum of lengths, is common to all canaries and is not used: half of
what a step is charged for stays unattacked, so the bounds are weaker than for other methods.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack.canaries import SATURATION, Readings
from vestige.audit.attack.training import Attacked, Target, as_numpy, attack, coins, inclusion
from vestige.audit.options import AuditOptions
from vestige.audit.result import Array, Flags
from vestige.geometry import to_cartesian

UNREAD_LENGTH = (
    "the length of the gradient, half of each charge, is common to all canaries and is not "
    "attacked: both bounds are weaker than for other methods"
)
PER_RUN = 512
FILLERS = 6000
RECORDS = FILLERS + PER_RUN // 2  # the declared size of the data of one run
_WIDE = 0.6  # a: beyond bounding pi/2 for boundings up to about 0.3


def tangent_readings(attacked: Attacked, canaries: int) -> tuple[Array, Array]:
    """The readings (steps, canaries), N(b * mu, 1) nearly, and mu (steps,)."""
    rows, shifts = [], []
    steps = zip(attacked.recording.sums, attacked.lots, attacked.references, strict=True)
    for look, lot, reference in steps:
        u = as_numpy(reference)
        radius, std = look.bounds[0], look.stds[0]
        turns = np.minimum(np.arccos(u), radius) / np.sqrt(1 - u**2)  # of e_j - u_j u
        inside = np.zeros(len(u), dtype=np.bool_)
        inside[lot[lot > 0]] = True
        along = np.where(inside, turns * u, 0.0)
        others = -u * (along.sum() - along)
        left = as_numpy(look.without_branch)[: len(u)] - others
        rows.append(left[1 : canaries + 1] / std)
        shifts.append(radius / std)
    return np.array(rows), np.array(shifts)


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


def run_angles(
    options: AuditOptions, noise: float, run: int, count: int, tell: Callable[[int], None]
) -> tuple[Attacked, Readings]:
    """One run with `count` canaries, and their readings."""
    rows = np.asarray(hadamard(PER_RUN), dtype=np.float64)
    wanted = np.concatenate([math.pi / 2 + _WIDE * rows, np.zeros((PER_RUN, 1))], axis=1)
    length = torch.full((PER_RUN,), SATURATION, dtype=torch.float64)
    gradients = to_cartesian(length, torch.from_numpy(wanted))
    table = torch.cat([gradients.new_zeros(1, gradients.shape[1]), gradients])
    member = coins(options, run).random(count) < 0.5
    numbers = torch.from_numpy(np.flatnonzero(member) + 1)
    numbers = torch.cat([torch.zeros(FILLERS, dtype=torch.int64), numbers])
    target = Target(
        AngleModel(table),
        TensorDataset(numbers, (numbers > 0).double()),
        lambda model, numbers, weights: weights * model(numbers),
        options.batch_size(RECORDS),
        RECORDS,
    )
    attacked = attack(options, target, noise, run=run, tell=tell)
    inside = inclusion(attacked.lots, PER_RUN)
    read, mu = _angle_readings(attacked, rows, wanted[:, :-1], inside)
    return attacked, Readings(read[:, :count], mu, member, inside[:, :count])


def _angle_readings(
    attacked: Attacked, rows: Array, wanted: Array, inside: Flags
) -> tuple[Array, Array]:
    """Projections of the released deviations on every canary's signs, less the other canaries."""
    read, shifts = [], []
    steps = zip(attacked.recording.sums, inside, attacked.references, strict=True)
    for look, present, reference in steps:
        phi = as_numpy(reference)[:PER_RUN]
        limit, std = look.bounds[0] / math.sqrt(PER_RUN + 4), look.stds[0]
        moves = np.clip(wanted - phi, -limit, limit)
        left = as_numpy(look.without_branch)[:PER_RUN] - moves[present].sum(axis=0)
        own = np.where(present, (moves * rows).sum(axis=1), 0.0)
        read.append((rows @ left + own) / math.sqrt(PER_RUN) / std)
        shifts.append(limit * math.sqrt(PER_RUN) / std)
    return np.array(read), np.array(shifts)
