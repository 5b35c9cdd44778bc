"""What a check found: each finding is a step, a figure, a bound, and a sentence that says so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from vestige.checks import as_json


@dataclass(frozen=True)
class Finding:
    """Something that must not be. `what` names the rule that was broken.

    `figure` is what was measured and `bound` what it may be at most, where these are numbers.
    """

    what: str
    sentence: str
    step: int | None = None
    figure: float | None = None
    bound: float | None = None

    def __str__(self) -> str:
        return self.sentence

    def as_dict(self) -> dict[str, Any]:
        """As strict JSON types: what is not finite is a string."""
        return {
            "what": self.what,
            "sentence": self.sentence,
            "step": self.step,
            "figure": as_json(self.figure),
            "bound": as_json(self.bound),
        }


@dataclass(frozen=True)
class Report:
    """A check's findings, and the public figures of what it looked at.

    `not_applicable` is the reason where a check does not apply to the method at all.
    """

    check: str
    findings: tuple[Finding, ...] = ()
    figures: Mapping[str, Any] = field(default_factory=dict)
    not_applicable: str | None = None

    @property
    def passed(self) -> bool:
        """Nothing was found."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """As strict JSON types."""
        return {
            "check": self.check,
            "passed": self.passed,
            "not_applicable": self.not_applicable,
            "findings": [finding.as_dict() for finding in self.findings],
            "figures": as_json(self.figures),
        }
