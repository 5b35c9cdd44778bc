"""One figure of the held-out records, released with noise and charged to a ledger of their own.

A record adds (h, 1 - h) to a pair of sums, where h from 0 to 1 says how right its prediction is.
Its norm is at most 1, since h^2 + (1 - h)^2 <= 1, so adding or removing one record moves the pair
by at most 1 in the Euclidean norm. The pair goes through the door like any other sum, clipped to 1,
at sampling rate 1, and the figure is the first part over the whole: post-processing. The number of
held-out records stays as private as they are.

Guarantee: (epsilon, delta)-differential privacy for adding or removing one held-out record; the
ledger is charged before the noise is drawn.
"""

from __future__ import annotations

import math
import secrets
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vestige.checks import finite
from vestige.gradients.groups import Groups, Slot
from vestige.plan import ADJACENCY
from vestige.privacy import accounting
from vestige.privacy.ledger import Facts, Ledger
from vestige.privacy.ledger_file import LedgerFile, common_data
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door
from vestige.sampling.streams import Randomness


def ledger_of_held_out(ledger: Path) -> Path:
    """The ledger of the held-out records, beside that of the training records."""
    return ledger.with_name(f"{ledger.stem}.held-out{ledger.suffix}")


def door_of_held_out(noise: float, randomness: Randomness, ledger: Ledger) -> Door:
    """The door that a pair of sums goes through, with noise of this standard deviation."""
    slot = Slot("held-out", nn.Parameter(torch.zeros(2)), 0, 0)
    return Door(
        Groups(("held-out",), (slot,)),
        NoiseScale.shared(noise),
        randomness,
        ledger,
        run=secrets.token_hex(8),
        facts=Facts(ADJACENCY, test_mode=randomness.repeatable),
    )


def noisy_share(door: Door, hits: Tensor) -> tuple[float, float]:
    """The noisy mean of `hits`, and the noisy number of them that it is a mean of.

    One release through `door`, at the charge of a Gaussian.
    """
    hits = hits.double().cpu().nan_to_num(0.0).clamp(0, 1)
    pair = torch.stack([hits.sum(), (1 - hits).sum()])
    right, wrong = door.release(ClippedSum(pair, (1.0,)), 1.0).values.tolist()
    count = max(right + wrong, 1.0)
    return float(min(max(right / count, 0.0), 1.0)), float(count)


def released_share(
    hits: Tensor, epsilon: float, delta: float, path: Path, about: dict[str, Any], seed: int | None
) -> dict[str, Any]:
    """The noisy mean of `hits`, with what it cost and what the ledger at `path` holds in all.

    `about` names the data, which must be that of the ledger. With a `seed` the noise is repeatable.
    """
    noise = accounting.calibrate(epsilon, delta, 1.0, 1).noise_multiplier
    randomness, ledger = Randomness(seed), Ledger()
    door = door_of_held_out(noise, randomness, ledger)
    file = LedgerFile(path)
    try:
        told: dict[str, Any] = {"data": about, "method": "held-out figure", "adjacency": ADJACENCY}
        earlier = file.content.runs.values()
        common_data([*(r.about for r in earlier), told])
        # Test mode has one key: another address than that of the training noise, and than those of
        # figures that were released before, whose noise would be the same.
        place = b"held-out %d " % len(earlier)
        randomness.relabel = lambda purpose: place + purpose
        told["test_mode"] = randomness.repeatable
        door.account = file.account(door.run, told, block=1)
        ledger.keep_in(file)
        share, count = noisy_share(door, hits)
        spent = accounting.epsilon(ledger.merged(), delta)
    finally:
        file.close()
    return {
        "share": share,
        # Of the noise, to first order and from released numbers alone.
        "standard_error": noise * math.hypot(share, 1 - share) / count,
        "epsilon": accounting.epsilon(door.own.events, delta),
        "epsilon_of_ledger": finite(spent),
        "delta": delta,
        "noise_std": noise,
        "adjacency": ADJACENCY,
    }
