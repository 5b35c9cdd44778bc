"""Reading releases of directions and angles: the two private forms of GeoDP.

Tangent. A canary e_i turns the public reference u by x_i = min(angle, R) (e_i - u_i u) /
sqrt(1 - u_i^2). The auditor knows u and the other canaries of the lot, so it subtracts what they do
to coordinate i; what is left is b * min(angle, R) * sqrt(1 - u_i^2) plus the noise of that
coordinate.

Box. Canary i asks for the angles pi/2 + a h_z, with h the i-th row of a Hadamard matrix and a well
beyond w = bounding pi / 2: its deviations are clipped to w h_z. Rows of the matrix are orthogonal:
the projections of the noise on different rows are independent. Records with a gradient of zero fill
the data up, which keeps the reference from drifting. docs/audit.md says why these are worst cases.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from scipy.linalg import hadamard
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vestige.audit.attack.canaries import SATURATION, Readings
from vestige.audit.attack.training import Attacked, Target, as_numpy, attack, coins, inclusion
from vestige.audit.bounds import Array, Flags
from vestige.audit.options import AuditOptions
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


def angle_runs(
    options: AuditOptions, noise: float, starts: range, tell: Callable[..., None]
) -> tuple[Attacked, Readings]:
    """Runs whose canaries begin at `starts`: the last of them, and the readings of all."""
    parts = []
    for run, start in enumerate(starts):
        count = min(PER_RUN, options.canaries - start)
        attacked, read = run_angles(options, noise, run, count, partial(tell, earlier=run))
        parts.append(read)
    return attacked, Readings.joined(parts)


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
        lambda model, batch: batch[1] * model(batch[0]),
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
