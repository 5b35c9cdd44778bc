"""Reading releases of directions: the tangent form of GeoDP.

A canary e_i turns the public reference u by x_i = min(angle, R) (e_i - u_i u) / sqrt(1 - u_i^2).
Its own coordinate of the release moves by nearly R, and it also touches the others' coordinates,
by about R / P. The auditor knows u and the other canaries of the lot, so it subtracts what they do;
what is left in coordinate i is b * min(angle, R) * sqrt(1 - u_i^2) plus the noise of that
coordinate, and different canaries are independent again.

The release's last number, the sum of lengths, is common to all canaries and is not used: half of
what a step is charged for stays unattacked, so the bounds are weaker than for other methods.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from vestige.audit.attack import Attacked, as_numpy

Array = npt.NDArray[np.float64]

UNREAD_LENGTH = (
    "the length of the gradient, half of each charge, is common to all canaries and is not "
    "attacked: both bounds are weaker than for other methods"
)


def tangent_readings(attacked: Attacked, canaries: int) -> tuple[Array, Array]:
    """The readings (steps, canaries), N(b * mu, 1) nearly, and mu (steps,)."""
    rows, shifts = [], []
    steps = zip(attacked.transcript.looks, attacked.lots, attacked.references, strict=True)
    for looks, lot, reference in steps:
        look, u = looks[0], as_numpy(reference)
        radius, std = look.bounds[0], look.stds[0]
        sines = np.sqrt(1 - u**2)
        turns = np.minimum(np.arccos(u), radius) / sines  # of e_j - u_j u
        inside = np.zeros(len(u), dtype=np.bool_)
        inside[lot[lot > 0]] = True
        along = np.where(inside, turns * u, 0.0)
        others = -u * (along.sum() - along)
        left = as_numpy(look.values)[: len(u)] - others
        rows.append(left[1 : canaries + 1] / std)
        shifts.append(radius / std)
    return np.array(rows), np.array(shifts)
