"""Runs on neighbouring data, for tests that compare them."""

from __future__ import annotations

from dataclasses import replace

from vestige.audit.verify.replay import Pair, record
from vestige.audit.verify.runs import Setting
from vestige.methods import (
    DPSAM,
    METHODS,
    Disk,
    Doppler,
    Kalman,
    resolve,
)

SIZE, STEPS, LOT = 30, 24, 6


BETA, CLIP = 0.7, 0.5


SMALL = Setting(size=SIZE, lot=LOT, steps=STEPS, noise_multiplier=0.8, clip=CLIP)


def small_settings(name):
    known = METHODS[name].load().__dataclass_fields__
    wanted = {
        "beta": BETA,
        "window": 5,
        "interval": (3.0, 3.1),
        "tempering": 0.7,
        "fixed": 0.3,
        "bands": 4,
    }
    return resolve(name, {key: value for key, value in wanted.items() if key in known})


def both(method, data=None, **options):
    """The recordings of a run and of its replay."""
    chosen = small_settings(method) if isinstance(method, str) else method
    setting = replace(SMALL, **options)
    first = record(chosen, setting, data=data)
    return Pair(first, record(chosen, setting, frozen=first.looks, data=data))


PRIVATE = [name for name, method in METHODS.items() if method.private]


VARIANTS = [
    DPSAM(sample="fresh"),
    Disk(ahead=0.5),
    Kalman(beta=BETA),
    Doppler(beta=BETA),
]
