"""What a check found: each finding is a step, a figure, a bound, and a sentence that says so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from vestige.checks import as_json

FALSE_ALARM = 1e-6  # of one run of a statistical check on a method that is right


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


Tested = tuple[Finding, float]
"""What would be reported, and the chance of such a figure where all is well."""


def alarms(tested: Sequence[Tested], false_alarm: float) -> list[Finding]:
    """Those whose chance is below their share of the rate of false alarms."""
    level = false_alarm / max(1, len(tested))
    return [finding for finding, chance in tested if not chance >= level]


def first_of_each(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """One finding of each kind: the first."""
    kept: dict[str, Finding] = {}
    for finding in findings:
        kept.setdefault(finding.what, finding)
    return tuple(kept.values())


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
            "findings": [as_json(asdict(finding)) for finding in self.findings],
            "figures": as_json(self.figures),
        }
