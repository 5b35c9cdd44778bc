"""What every way of attacking hands over, and how it becomes a result."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from vestige.audit.bounds import Split, family_events, membership_epsilon, shift_lower
from vestige.audit.result import AuditResult, Evidence
from vestige.audit.setting import Setting
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.privacy.accounting import Charge, epsilon

Array = npt.NDArray[np.float64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Trials:
    """The scores of an attack. One membership trial for each canary; any number of family trials.

    `attacked` is the planned multiplier of the events that the family trials are about, `canary`
    the number of the canary that a family trial is about.
    """

    scores: Array
    member: Flags
    family_scores: Array
    family_inside: Flags
    canary: npt.NDArray[np.int64]
    attacked: float
    charges: Mapping[Charge, int]
    noise: float
    engine: PrivacyEngine
    notes: tuple[str, ...] = ()


def judge(setting: Setting, trials: Trials, begun: float) -> AuditResult:
    """The two bounds beside the engine's own claim."""
    count = len(trials.member)
    whole = Split.by_canary(np.arange(count), count)
    each = Split.by_canary(trials.canary, count)
    lower, cut = membership_epsilon(
        trials.scores, trials.member, whole, setting.delta, setting.confidence
    )
    shift = shift_lower(trials.family_scores, trials.family_inside, each, setting.confidence)
    allowed = 1 / shift if shift else math.inf
    family = family_events(trials.charges, trials.noise, trials.attacked, allowed)
    engine = trials.engine
    claimed, rate = engine.get_epsilon(setting.delta), engine.plan.sample_rate
    return AuditResult(
        method=setting.method.name,
        mode="canary",
        epsilon_lower=lower,
        epsilon_lower_family=epsilon(family, setting.delta),
        epsilon_claimed=claimed if math.isfinite(claimed) else None,
        epsilon_published=None,
        confidence=setting.confidence,
        delta=setting.delta,
        trials=count,
        family_trials=len(trials.family_scores),
        steps=setting.steps,
        sample_rate=rate[0] if isinstance(rate, tuple) else rate,
        noise_multiplier=trials.noise,
        noise_multiplier_attacked=trials.attacked,
        noise_multiplier_upper=allowed if math.isfinite(allowed) else None,
        clipping=engine.plan.clipping,
        seeded=setting.seed is not None,
        seconds=time.perf_counter() - begun,
        notes=trials.notes,
        evidence=Evidence(
            trials.scores,
            trials.member,
            whole.choosing,
            cut,
            trials.family_scores,
            trials.family_inside,
            each.choosing,
            engine.ledger.merged(),
            family,
        ),
    )
