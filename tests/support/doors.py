"""A door of two small groups."""

from __future__ import annotations

import numpy as np
from torch import nn

from vestige.gradients.groups import partition
from vestige.memory.history import History
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door
from vestige.sampling.streams import Randomness


def door_of(groups, noise, ledger=None):
    return Door(groups, noise, Randomness(), Ledger() if ledger is None else ledger)


def linear_groups():
    return partition(nn.Linear(7, 5), "flat")


def branch_of(groups, values, step):
    """A branch with given values, by way of a history that remembers one release of them."""
    door = door_of(groups, NoiseScale.shared(0.0))
    history = History([slice(0, groups.size)], groups.buffer(), window=2, ema=1.0)
    for _ in range(step):
        history.append(door.release(ClippedSum(values, (1.0,)), 0.1))
    return history.mix(np.ones((1, 1)))
