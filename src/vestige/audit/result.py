"""What an audit found."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt

from vestige.audit.bounds import Cut
from vestige.checks import as_json, finite
from vestige.privacy.ledger import Event


@dataclass(frozen=True)
class Evidence:
    """The trials behind the bounds, for plots: scores, who was in, and which of them chose.

    `cut` is the membership test on the second half. The family's trials may be none. The events
    are what the engine charged, and the run with as much noise as the family's trials allow.
    """

    scores: npt.NDArray[np.float64]
    member: npt.NDArray[np.bool_]
    choosing: npt.NDArray[np.bool_]
    cut: Cut
    family_scores: npt.NDArray[np.float64] | None = None
    family_inside: npt.NDArray[np.bool_] | None = None
    family_choosing: npt.NDArray[np.bool_] | None = None
    claimed_events: tuple[Event, ...] = ()
    family_events: tuple[Event, ...] = ()


@dataclass(frozen=True)
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
    epsilon_lower_family: float | None
    epsilon_claimed: float | None
    epsilon_published: float | None
    confidence: float
    delta: float
    trials: int
    family_trials: int
    steps: int
    sample_rate: float
    noise_multiplier: float
    noise_multiplier_attacked: float | None
    noise_multiplier_upper: float | None
    clipping: str
    seeded: bool
    seconds: float
    notes: tuple[str, ...] = ()
    evidence: Evidence | None = field(default=None, repr=False, compare=False)

    @property
    def violated(self) -> bool:
        """Whether a bound exceeds the claim: the engine's, or else the published one."""
        claim = self.epsilon_claimed
        claim = self.epsilon_published if claim is None else claim
        largest = max(self.epsilon_lower, self.epsilon_lower_family or 0.0)
        return claim is not None and largest > claim

    @property
    def level(self) -> str:
        """The confidence in words; never rounded to 100%."""
        return f"{100 * self.confidence:.6g}%"

    def as_dict(self) -> dict[str, Any]:
        """JSON types; infinity is None."""
        found: dict[str, Any] = {}
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name == "evidence":
                continue
            found[one.name] = as_json(finite(value) if isinstance(value, float) else value)
        found["violated"] = self.violated
        return found
