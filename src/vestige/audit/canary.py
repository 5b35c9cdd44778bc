"""Worst-case canaries in one run of the real engine: `audit(method, ...)`.

Half of the canaries, by a fair coin each, are in the data. Every one saturates every clip bound in
coordinates of its own (canaries.py), so one run is as many independent trials as there are canaries
(readings.py says why). The auditor sees all releases, subtracts the public branch of a memory, and
makes two kinds of test:

    membership   is the canary in the data? One trial for each canary, over all steps. The bound is
                 free of assumptions about the mechanism: `epsilon_lower`.
    family       was the canary in this lot? One trial for each canary and step, its inclusion in
                 the Poisson draw known. The error rates bound the noise multiplier of a subsampled
                 Gaussian, whose epsilon over the run, at the plan's sampling rate, is
                 `epsilon_lower_family`.

bounds.py has the two bounds. Methods with correlated noise are read in whitening.py, those that
release directions in directions.py and angles.py, those that are not private in published.py.

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
from torch import Tensor, nn

from vestige.audit import angles
from vestige.audit.attack import CLIP, Attacked, Tell, attack, coins, inclusion
from vestige.audit.canaries import SATURATION, Canaries, CanaryModel
from vestige.audit.directions import UNREAD_LENGTH, tangent_readings
from vestige.audit.published import audit_published
from vestige.audit.readings import membership_scores, readings
from vestige.audit.result import AuditResult, Evidence
from vestige.audit.setting import CONFIDENCE, DELTA, SAMPLE_RATE, TRIALS, Setting
from vestige.audit.trials import Array, Flags, Trials, judge
from vestige.audit.whitening import correlated_scores
from vestige.errors import ConfigError
from vestige.geometry import Box, Tangent
from vestige.methods import Method
from vestige.plan import at
from vestige.privacy.accounting import Charge

__all__ = ["AuditResult", "Evidence", "audit"]

_CLOSE = 1.2  # releases whose multiplier is within this factor of the smallest are attacked


def audit(
    method: str | Method,
    *,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    steps: int | None = None,
    trials: int = TRIALS,
    confidence: float = CONFIDENCE,
    delta: float = DELTA,
    seed: int | None = None,
    clipping: Any = None,
    sample_rate: float = SAMPLE_RATE,
    progress: Tell | None = None,
) -> AuditResult:
    """Attack a method, by name or as an instance, and bound its epsilon from below.

    Give `epsilon`, the claim that the noise is solved for (default 2), or `noise_multiplier`.
    `trials` counts canaries. With `seed` the run repeats itself (test mode); without it coins and
    noise are the operating system's. `progress(what, done, total)` is told about every step.
    """
    begun = time.perf_counter()
    setting = Setting.checked(
        method,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        steps=steps,
        trials=trials,
        confidence=confidence,
        delta=delta,
        seed=seed,
        clipping=clipping,
        sample_rate=sample_rate,
    )
    tell = progress or _silent
    if not setting.method.private:
        return audit_published(setting, tell, begun)
    return judge(setting, _trials(setting, tell), begun)


def _silent(what: str, done: int, total: int) -> None:
    pass


def loss(model: nn.Module, numbers: Tensor, weights: Tensor) -> Tensor:
    """The linear loss of canaries, far beyond the clip bound."""
    each: Tensor = weights * (SATURATION * CLIP) * model(numbers)
    return each


def _trials(setting: Setting, tell: Tell) -> Trials:
    """Attack in the way that the method's releases are to be read."""
    steps, trials = setting.steps, setting.trials
    chosen = setting.method.tabulated(steps)
    geometry = chosen.geometry(torch.zeros(4))
    if isinstance(geometry, Box):
        return _angle_trials(setting, tell)
    if geometry is not None and not isinstance(geometry, Tangent):
        raise ConfigError(
            f"method {chosen.name!r} releases a {type(geometry).__name__}, which the canaries do "
            "not know how to read: use --mode one-run."
        )
    records = trials if setting.zeroed else trials // 2
    charges = setting.charges(records)
    tell("noise for the claim", 0, steps)
    noise = setting.noise_multiplier(charges)
    canaries = Canaries.tossed(trials, coins(setting), setting.zeroed)
    found = attack(
        setting,
        CanaryModel(trials, setting.layers),
        canaries.dataset(),
        setting.batch_size(records),
        noise,
        loss,
        declared=None if setting.zeroed else records,
        tell=lambda step: tell("training", step, steps),
    )
    tell("bounds", steps, steps)
    if found.engine._attached().door.correlation is not None:
        scores = correlated_scores(setting, found, canaries, noise)
        return Trials(
            scores.membership,
            canaries.member,
            scores.family,
            scores.inside,
            scores.canary,
            noise / max(charge.weight for charge in charges),
            charges,
            noise,
            found.engine,
        )
    read, mu = (tangent_readings if geometry else readings)(found, trials)
    inside = inclusion(found.lots, trials) & canaries.member
    return _plain(
        setting,
        noise,
        charges,
        found,
        read,
        mu,
        inside,
        canaries.member,
        (UNREAD_LENGTH,) if geometry else (),
    )


def _angle_trials(setting: Setting, tell: Tell) -> Trials:
    """Several runs, since one has few canaries."""
    charges = setting.charges(angles.records())
    runs = -(-setting.trials // angles.PER_RUN)
    total = runs * setting.steps
    tell("noise for the claim", 0, total)
    noise = setting.noise_multiplier(charges)
    parts: list[list[Any]] = [[], [], []]
    for run in range(runs):
        count = min(angles.PER_RUN, setting.trials - run * angles.PER_RUN)
        done = run * setting.steps

        def told(step: int, done: int = done) -> None:
            tell("training", done + step, total)

        found, read, mu, member, inside = angles.run_angles(setting, noise, run, count, told)
        for part, one in zip(parts, (read, member, inside), strict=True):
            part.append(one)
    tell("bounds", total, total)
    read, member, inside = (np.concatenate(part, axis=-1) for part in parts)
    return _plain(setting, noise, charges, found, read, mu, inside, member, (UNREAD_LENGTH,))


def _plain(
    setting: Setting,
    noise: float,
    charges: Counter[Charge],
    found: Attacked,
    read: Array,
    mu: Array,
    inside: Flags,
    member: Flags,
    notes: tuple[str, ...],
) -> Trials:
    """Independent readings: a family trial is a canary in a step."""
    plan, steps = found.engine.plan, setting.steps
    rates = np.array([at(plan.sample_rate, t) for t in range(steps)])
    planned = setting.multipliers(noise)
    used = [t for t in range(steps) if planned[t] <= _CLOSE * min(planned)]
    number = np.broadcast_to(np.arange(len(member)), (len(used), len(member)))
    return Trials(
        membership_scores(read, mu, rates),
        member,
        read[used].ravel(),
        inside[used].ravel(),
        number.ravel(),
        min(planned),
        charges,
        noise,
        found.engine,
        notes,
    )
