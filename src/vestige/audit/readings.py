"""From releases to one number for each canary and step: N(b * mu, 1), b saying if it was in.

In layer l, clipped in group g, a canary that is in the lot moves its own coordinate by

    d_l = gain * C_g / sqrt(layers of g)

and the noise there has standard deviation s_g. The coordinates of one canary in all layers and all
looks at the lot are one Gaussian vector, so its best statistic is sum_l d_l y_l / s_g^2, over its
own standard deviation; mu = sqrt(sum_l d_l^2 / s_g^2), which is 1/sigma_eff jointly over all
groups.

Why the readings of different canaries and steps are independent: they are made of different
coordinates of the noise vectors, which are independent numbers, and of different inclusion coins,
which Poisson sampling tosses apart for every record and lot. What one canary does to another's
coordinate is nothing, by construction of the data; what the past does to it is the branch, which
is public and was subtracted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import numpy.typing as npt

from vestige.audit.attack import Attacked, as_numpy
from vestige.audit.transcript import Look
from vestige.gradients.groups import Groups

Array = npt.NDArray[np.float64]


def readings(attacked: Attacked, canaries: int) -> tuple[Array, Array]:
    """The readings (steps, canaries) and the claimed mu (steps,) of a run on `CanaryModel`."""
    groups = attacked.engine._attached().groups
    found = [_reading(looks, groups, canaries) for looks in attacked.transcript.looks]
    return np.array([reading for reading, _ in found]), np.array([mu for _, mu in found])


def standardised(attacked: Attacked, canaries: int, noise: float) -> tuple[Array, float]:
    """The readings in units of the noise before it is correlated, and their mu, which is constant.

    `noise` is the joint multiplier: the noise has one standard deviation in all groups.
    """
    groups, looks = attacked.engine._attached().groups, attacked.transcript.looks
    found = []
    for look in (each[0] for each in looks):
        std = noise * float(np.linalg.norm(look.bounds))
        plain = replace(look, stds=(std,) * len(look.bounds))
        found.append(_reading([plain], groups, canaries))
    return np.array([reading for reading, _ in found]), found[0][1]


def _reading(looks: Sequence[Look], groups: Groups, canaries: int) -> tuple[Array, float]:
    total, square = np.zeros(canaries), 0.0
    shared = [sum(slot.group == g for slot in groups.slots) for g in range(groups.count)]
    for look in looks:
        values = as_numpy(look.values)
        for slot in groups.slots:
            moved = look.gain * look.bounds[slot.group] / shared[slot.group] ** 0.5
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
    found: Array = each.sum(axis=0)
    return found
