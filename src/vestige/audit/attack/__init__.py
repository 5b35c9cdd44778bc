"""Attacks on the real engine: `run(options)` is one audit.

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

from vestige.audit.attack import canary, one_run
from vestige.audit.attack.training import Tell, silent
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult


def run(options: AuditOptions, progress: Tell = silent) -> AuditResult:
    """The audit that `options` ask for; `progress(what, done, total)` is told about every step."""
    attacked = canary.attacked if options.mode == "canary" else one_run.attacked
    return attacked(options, progress)
