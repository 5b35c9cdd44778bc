"""Worst-case canaries in one run of the real engine: `audit(method, ...)`.

Half of the canaries, by a fair coin each, are in the data. Every one saturates every clip bound in
coordinates of its own (canaries.py, which also says why one run is as many independent trials as
there are canaries). The auditor sees all releases, subtracts the public branch of a memory, and
makes two kinds of test:

    membership   is the canary in the data? One trial for each canary, over all steps. The bound is
                 free of assumptions about the mechanism: `epsilon_lower`.
    family       was the canary in this lot? One trial for each canary and step, its inclusion in
                 the Poisson draw known. The error rates bound the noise multiplier of a subsampled
                 Gaussian, whose epsilon over the run, at the plan's sampling rate, is
                 `epsilon_lower_family`.

bounds.py has the two bounds. Methods with correlated noise are read in correlated.py, those that
release directions or angles in directions.py, those that are not private in published.py.

Papers: Jagielski et al. 2020, arXiv 2006.07709; Nasr et al. 2021, arXiv 2101.04535, and 2023, arXiv
2302.07956. Several orthogonal canaries in one run: after Steinke et al. 2023, arXiv 2305.08846.
Guarantee: each bound exceeds the true epsilon of the attacked run with probability at most
1 - confidence, the family bound if the mechanism belongs to the family. A small bound shows
nothing; one above the claim shows a broken engine.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np
import torch

from vestige.audit.attack import directions
from vestige.audit.attack.canaries import Canaries, Readings, membership_scores, readings
from vestige.audit.attack.correlated import correlated_scores
from vestige.audit.attack.published import attacked as published
from vestige.audit.attack.training import Tell, attack, coins, inclusion, silent
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult, Family, judge
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.geometry import Box, Tangent
from vestige.methods import Method
from vestige.plan import at
from vestige.privacy.accounting import Charge

_CLOSE = 1.2  # releases whose multiplier is within this factor of the smallest are attacked


def audit(method: str | Method, *, progress: Tell = silent, **options: Any) -> AuditResult:
    """Attack a method, by name or as an instance, and bound its epsilon from below.

    `options` are those of `AuditOptions`. Give `epsilon`, the claim that the noise is solved for
    (default 2), or `noise_multiplier`. `trials` counts canaries. With `seed` the run repeats itself
    (test mode); without it coins and noise are the operating system's. `progress(what, done,
    total)` is told about every step.
    """
    return attacked(AuditOptions(method=method, mode="canary", **options), progress)


def attacked(options: AuditOptions, tell: Tell) -> AuditResult:
    """Attack in the way that the method's releases are to be read."""
    begun = time.perf_counter()
    if not options.chosen.private:
        return published(options, tell, begun)
    geometry = options.chosen.tabulated(options.length).geometry(torch.zeros(4))
    if isinstance(geometry, Box):
        return _angles(options, tell, begun)
    if geometry is not None and not isinstance(geometry, Tangent):
        raise ConfigError(
            f"method {options.chosen.name!r} releases a {type(geometry).__name__}, which the "
            "canaries do not know how to read: use --mode one-run."
        )
    steps, count = options.length, options.canaries
    tell("noise for the claim", 0, steps)
    charges = options.charges(options.records)
    noise = options.noise(charges)
    canaries = Canaries.tossed(count, coins(options), options.zeroed)
    run = attack(
        options, canaries.target(options), noise, tell=lambda step: tell("training", step, steps)
    )
    tell("bounds", steps, steps)
    if run.engine.door.correlation is not None:
        scores, trials = correlated_scores(options, run, canaries, noise)
        family = Family(*trials, noise / max(charge.weight for charge in charges), charges)
        return judge(
            options, run.engine, begun, scores, canaries.member, family, noise_multiplier=noise
        )
    numbers, mu = (directions.tangent_readings if geometry else readings)(run, count)
    read = Readings(numbers, mu, canaries.member, inclusion(run.lots, count) & canaries.member)
    notes = (directions.UNREAD_LENGTH,) if geometry else ()
    figures = {"noise_multiplier": noise, "notes": notes}
    return _judged(options, run.engine, begun, read, charges, figures)


def _angles(options: AuditOptions, tell: Tell, begun: float) -> AuditResult:
    """Several runs, since one has few canaries."""
    charges = options.charges(directions.RECORDS)
    starts = range(0, options.canaries, directions.PER_RUN)
    total = len(starts) * options.length
    tell("noise for the claim", 0, total)
    noise = options.noise(charges)
    parts = []
    for run, start in enumerate(starts):
        count = min(directions.PER_RUN, options.canaries - start)

        def told(step: int, done: int = run * options.length) -> None:
            tell("training", done + step, total)

        attacked, read = directions.run_angles(options, noise, run, count, told)
        parts.append(read)
    tell("bounds", total, total)
    figures = {"noise_multiplier": noise, "notes": (directions.UNREAD_LENGTH,)}
    return _judged(options, attacked.engine, begun, Readings.joined(parts), charges, figures)


def _judged(
    options: AuditOptions,
    engine: PrivacyEngine,
    begun: float,
    read: Readings,
    charges: Counter[Charge],
    figures: dict[str, Any],
) -> AuditResult:
    """Independent readings: a family trial is a canary in a step."""
    rates = np.array([at(engine.plan.sample_rate, t) for t in range(options.length)])
    planned = options.multipliers(figures["noise_multiplier"])
    used = [t for t, multiplier in enumerate(planned) if multiplier <= _CLOSE * min(planned)]
    count = len(read.member)
    family = Family(
        read.numbers[used].ravel(),
        read.inside[used].ravel(),
        np.broadcast_to(np.arange(count), (len(used), count)).ravel(),
        min(planned),
        charges,
    )
    scores = membership_scores(read.numbers, read.mu, rates)
    return judge(options, engine, begun, scores, read.member, family, **figures)
