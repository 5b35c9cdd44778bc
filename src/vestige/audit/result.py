"""What an audit found, and the one way from the scores of an attack to it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from vestige.audit.bounds import (
    Array,
    Cut,
    Flags,
    Numbers,
    Trials,
    family_events,
    membership_epsilon,
    shift_lower,
)
from vestige.audit.options import AuditOptions
from vestige.checks import as_json, finite
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.privacy.accounting import Charge, epsilon
from vestige.privacy.events import Event


@dataclass(frozen=True)
class Evidence:
    """The trials behind the bounds, for plots: of membership, and of the family where it has any.

    `cut` is the membership test on the trials that are judged. The events are what the engine
    charged, and the run with as much noise as the family's trials allow.
    """

    whole: Trials
    cut: Cut
    family: Trials | None = None
    claimed_events: tuple[Event, ...] = ()
    family_events: tuple[Event, ...] = ()


@dataclass(frozen=True, kw_only=True)
class AuditResult:
    """Two empirical lower bounds on epsilon beside the claimed upper bound.

    `epsilon_claimed` is None where the engine reports infinity, `epsilon_published` what the paper
    of such a method would claim. `epsilon_lower_family` is None where the method has no family,
    and `notes` say why. `noise_multiplier_upper` is the largest multiplier that the family's trials
    allow, `noise_multiplier_attacked` the planned one.
    """

    method: str
    mode: str
    epsilon_lower: float
    epsilon_lower_family: float | None = None
    epsilon_claimed: float | None
    epsilon_published: float | None = None
    confidence: float
    delta: float
    trials: int
    family_trials: int = 0
    steps: int
    sample_rate: float
    noise_multiplier: float
    noise_multiplier_attacked: float | None = None
    noise_multiplier_upper: float | None = None
    clipping: str
    seeded: bool
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    evidence: Evidence = field(repr=False, compare=False)

    @property
    def limit(self) -> float | None:
        """The claim to hold the bounds against: the engine's, or else the published one."""
        return self.epsilon_published if self.epsilon_claimed is None else self.epsilon_claimed

    @property
    def violated(self) -> bool:
        """Whether a bound exceeds the claim."""
        largest = max(self.epsilon_lower, self.epsilon_lower_family or 0.0)
        return self.limit is not None and largest > self.limit

    @property
    def level(self) -> str:
        """The confidence in words; never rounded to 100%."""
        return f"{100 * self.confidence:.6g}%"

    def as_dict(self) -> dict[str, Any]:
        """JSON types; infinity is None."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        del values["evidence"]
        for name, value in values.items():
            values[name] = as_json(finite(value) if isinstance(value, float) else value)
        return values | {"violated": self.violated}


@dataclass(frozen=True)
class Family:
    """Trials of one release each: was the canary in it?

    `canary` is the number of the canary that a trial is about, `attacked` the planned multiplier of
    the events that the trials are about, `charges` what the whole run is charged.
    """

    scores: Array
    inside: Flags
    canary: Numbers
    attacked: float
    charges: Mapping[Charge, int]


def result_of(
    options: AuditOptions, engine: PrivacyEngine, evidence: Evidence, **figures: Any
) -> AuditResult:
    """What was found beside what the options and the engine say; `figures` may say otherwise."""
    rate = engine.plan.sample_rate
    settings = {
        "method": options.chosen.name,
        "mode": options.mode,
        "epsilon_claimed": finite(engine.get_epsilon(options.delta)),
        "confidence": options.confidence,
        "delta": options.delta,
        "trials": len(evidence.whole.inside),
        "steps": options.length,
        "sample_rate": rate[0] if isinstance(rate, tuple) else rate,
        "clipping": engine.plan.clipping,
        "seeded": options.seed is not None,
        "evidence": evidence,
    }
    return AuditResult(**settings | figures)


def judge(
    options: AuditOptions,
    engine: PrivacyEngine,
    scores: Array,
    member: Flags,
    family: Family | None = None,
    **figures: Any,
) -> AuditResult:
    """The bounds from one membership trial for each canary, and from the family's trials."""
    count = len(member)
    whole = Trials.of(scores, member, np.arange(count), count)
    lower, cut = membership_epsilon(whole, options.delta, options.confidence)
    evidence = Evidence(whole, cut)
    if family is not None:
        trials = Trials.of(family.scores, family.inside, family.canary, count)
        shift = shift_lower(trials, options.confidence)
        allowed, noise = 1 / shift if shift else math.inf, figures["noise_multiplier"]
        events = family_events(family.charges, noise, family.attacked, allowed)
        evidence = Evidence(whole, cut, trials, engine.ledger.merged(), events)
        figures |= {
            "epsilon_lower_family": epsilon(events, options.delta),
            "family_trials": len(family.scores),
            "noise_multiplier_attacked": family.attacked,
            "noise_multiplier_upper": finite(allowed),
        }
    return result_of(options, engine, evidence, epsilon_lower=lower, **figures)
