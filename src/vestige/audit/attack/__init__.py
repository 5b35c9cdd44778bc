"""Attacks on the real engine: `audit(method)`, or `run(options)`, is one audit.

training.py    one run of the engine, and what came out of its door
canary.py      worst-case gradients in one run, read off the releases
canaries.py    their model, their data, and how releases are read
correlated.py  reading releases whose noise is correlated from lot to lot
directions.py  reading releases of directions and angles
published.py   the methods that were published as private and are not, on adversarial data
one_run.py     loss-based: one training run, many canaries, nothing but the final model
rows.py        what it costs if rows are attributed to the wrong record
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from vestige.audit.attack import canary, one_run
from vestige.audit.attack.training import Tell
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult
from vestige.methods import Method


def _silent(what: str, done: int, total: int) -> None:
    pass


def audit(method: str | Method, *, progress: Tell = _silent, **options: Any) -> AuditResult:
    """Attack a method, by name or as an instance, and bound its epsilon from below.

    `options` are those of `AuditOptions`. Give `epsilon`, the claim that the noise is solved for
    (default 2), or `noise_multiplier`. `trials` counts canaries. With `seed` the run repeats itself
    (test mode); without it coins and noise are the operating system's. `progress(what, done,
    total)` is told about every step.
    """
    return run(AuditOptions(method=method, **options), progress)


def run(options: AuditOptions, progress: Tell = _silent) -> AuditResult:
    """The audit that `options` ask for."""
    begun = time.perf_counter()
    attacked = canary.attacked if options.mode == "canary" else one_run.attacked
    return replace(attacked(options, progress), seconds=time.perf_counter() - begun)
