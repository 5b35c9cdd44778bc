"""Worst-case canaries in one run of the real engine.

Half of the canaries, by a fair coin each, are in the data. Every one saturates every clip bound in
coordinates of its own, so that one run is as many independent trials as there are canaries. The
auditor sees all releases, subtracts the public branch of a memory, and makes two kinds of test, of
membership in the data and of inclusion in a lot; docs/audit.md says what each of them shows.

Papers: Jagielski et al. 2020, arXiv 2006.07709; Nasr et al. 2021, arXiv 2101.04535, and 2023, arXiv
2302.07956. Several orthogonal canaries in one run: after Steinke et al. 2023, arXiv 2305.08846.
Guarantee: each bound exceeds the true epsilon of the attacked run with probability at most
1 - confidence, the family bound if the mechanism belongs to the family. A small bound shows
nothing; one above the claim shows a broken engine.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from vestige.audit.attack import directions, published
from vestige.audit.attack.canaries import Canaries, Readings, membership_scores, readings
from vestige.audit.attack.correlated import correlated_scores
from vestige.audit.attack.training import Tell, attack, coins, inclusion
from vestige.audit.options import AuditOptions
from vestige.audit.result import AuditResult, Family, judge
from vestige.errors import ConfigError
from vestige.geometry import Box, Tangent
from vestige.plan import at

_CLOSE = 1.2  # releases whose multiplier is within this factor of the smallest are attacked


def attacked(options: AuditOptions, tell: Tell) -> AuditResult:
    """Attack in the way that the method's releases are to be read."""
    if not options.chosen.private:
        return published.attacked(options, tell)
    geometry = options.chosen.tabulated(options.length).geometry(torch.zeros(4))
    if geometry is not None and not isinstance(geometry, Tangent | Box):
        raise ConfigError(
            f"method {options.chosen.name!r} releases a {type(geometry).__name__}, which the "
            "canaries do not know how to read: use --mode one-run."
        )
    box, count, length = isinstance(geometry, Box), options.canaries, options.length
    charges = options.charges(directions.RECORDS if box else options.records)
    starts = range(0, count, directions.PER_RUN if box else count)
    tell("noise for the claim", 0, len(starts) * length)
    noise = options.noise(charges)

    def told(step: int, earlier: int = 0) -> None:
        done, total = earlier * length + step, len(starts) * length
        tell("training" if done < total else "bounds", done, total)

    if box:  # several runs, since one has few canaries
        run, read = directions.angle_runs(options, noise, starts, told)
    else:
        canaries = Canaries.tossed(count, coins(options), options.zeroed)
        run = attack(options, canaries.target(options), noise, tell=told)
        if run.engine.door.correlation is not None:
            scores, trials = correlated_scores(options, run, canaries, noise)
            family = Family(*trials, noise / max(charge.weight for charge in charges), charges)
            member = canaries.member
            return judge(options, run.engine, scores, member, family, noise_multiplier=noise)
        numbers, mu = (directions.tangent_readings if geometry else readings)(run, count)
        read = Readings(numbers, mu, canaries.member, inclusion(run.lots, count) & canaries.member)
    figures: dict[str, Any] = {"notes": (directions.UNREAD_LENGTH,)} if geometry else {}
    # Independent readings: a family trial is a canary in a step.
    rates = np.array([at(run.engine.plan.sample_rate, t) for t in range(length)])
    planned = options.multipliers(noise)
    used = [t for t, multiplier in enumerate(planned) if multiplier <= _CLOSE * min(planned)]
    canary = np.broadcast_to(np.arange(count), (len(used), count)).ravel()
    trials = read.numbers[used].ravel(), read.inside[used].ravel(), canary
    family = Family(*trials, min(planned), charges)
    scores = membership_scores(read.numbers, read.mu, rates)
    return judge(
        options, run.engine, scores, read.member, family, noise_multiplier=noise, **figures
    )
