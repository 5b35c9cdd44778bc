"""Every check on one method, one after the other: `verify(method)`."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from vestige.audit.attack import audit
from vestige.audit.verify import lots, noise, replay, rows
from vestige.audit.verify.findings import Finding, Report
from vestige.audit.verify.loading import one_line
from vestige.audit.verify.runs import OBSERVED, Observation
from vestige.errors import ConfigError
from vestige.gradients.clipping import Clipping
from vestige.methods import Method, planned_charges, resolve
from vestige.privacy.accounting import events_of
from vestige.privacy.events import Event, merge

TRIALS, QUICK_TRIALS, QUICK_STEPS = 4000, 1000, 60
CONFIDENCE = 0.999  # of the canaries' bounds: a right method fails once in five hundred times
CHECKS = ("claim", "replay", "rows", "noise", "lots", "audit")


@dataclass(frozen=True)
class Verdict:
    """The reports of all checks of one method."""

    method: str
    reports: tuple[Report, ...]
    seconds: float
    seeded: bool

    @property
    def findings(self) -> list[Finding]:
        """What the checks found: each is a sentence, a figure and a bound."""
        return [finding for report in self.reports for finding in report.findings]

    @property
    def passed(self) -> bool:
        """No check found anything."""
        return not self.findings

    def as_dict(self) -> dict[str, Any]:
        """As strict JSON types."""
        return {
            "method": self.method,
            "passed": self.passed,
            "checks": [report.as_dict() for report in self.reports],
            "seeded": self.seeded,
            "seconds": self.seconds,
        }


def verify(
    method: str | Method,
    *,
    checks: Sequence[str] = CHECKS,
    trials: int = TRIALS,
    seed: int | None = None,
    quick: bool = False,
    clipping: Clipping | None = None,
    tell: Callable[[str], None] = lambda check: None,
) -> Verdict:
    """Run the checks on `method`, all or some. `quick` takes fewer releases and canaries.

    With `seed` everything repeats itself; without it keys, noise and canaries' coins are the
    operating system's. `clipping` takes the place of the method's own. `tell` is told which check
    is under way.
    """
    begun, chosen = time.perf_counter(), resolve(method)
    steps = QUICK_STEPS if quick else OBSERVED.steps
    canaries = min(trials, QUICK_TRIALS) if quick else trials

    @cache
    def observed() -> list[Observation]:
        return noise.observations(chosen, steps, seed, clipping)

    examined: dict[str, Callable[[], Report]] = {
        "claim": lambda: _claim(chosen, observed),
        "replay": lambda: replay.examine(chosen, clipping=clipping),
        "rows": rows.examine,
        "noise": lambda: noise.examine(observed()),
        "lots": lambda: lots.examine(observed()[0]),
        "audit": lambda: _audit(chosen, canaries, seed, clipping),
    }
    unknown = [name for name in checks if name not in examined]
    if unknown:
        raise ConfigError(f"check {unknown[0]!r} is unknown: choose from {', '.join(CHECKS)}.")
    reports = []
    for name in checks:
        tell(name)
        reports.append(_carried_out(name, examined[name]))
    title = chosen.name or type(chosen).__name__
    return Verdict(title, tuple(reports), time.perf_counter() - begun, seed is not None)


def _carried_out(name: str, check: Callable[[], Report]) -> Report:
    """A check that cannot be carried out has not passed."""
    try:
        return check()
    except Exception as error:
        sentence = f"the check stopped with {type(error).__name__}: {one_line(error)}"
        return Report(name, (Finding("could not run", sentence),))


def _claim(method: Method, observed: Callable[[], list[Observation]]) -> Report:
    """Whether there is a claim, and whether what was planned is what was charged."""
    if not method.private:
        sentence = f"the method says itself that it is not private ({method.guarantee})."
        return Report("claim", (Finding("no claim", sentence),))
    one = observed()[0]
    charged = merge(Event(*charge) for look in one.whole.looks for charge in look.charges)
    plan, steps = one.plan, one.setting.steps
    counts = one.whole.sums[0].counts
    planned = planned_charges(
        method.tabulated(steps),
        method.clipping if one.setting.clipping is None else one.setting.clipping,
        1 if counts is None else counts.numel(),
        plan.dataset_size,
        plan.batch_size,
        plan.batch_size / plan.dataset_size,
        steps,
    )
    expected = merge(events_of(planned, one.setting.noise_multiplier))
    figures = {"guarantee": method.guarantee, "events": len(charged)}
    if _alike(charged, expected):
        return Report("claim", figures=figures)
    sentence = (
        f"a run of {steps} steps plans to be charged {_told(expected)} and is charged "
        f"{_told(charged)}: a target epsilon would be missed."
    )
    return Report("claim", (Finding("planned charges", sentence),), figures)


def _alike(charged: tuple[Event, ...], expected: tuple[Event, ...]) -> bool:
    return len(charged) == len(expected) and all(
        a.count == b.count and all(map(math.isclose, a.key[:2], b.key[:2]))
        for a, b in zip(charged, expected, strict=True)
    )


def _told(events: tuple[Event, ...]) -> str:
    told = [f"{e.count} x (rate {e.sample_rate:.4g}, {e.noise_multiplier:.4g})" for e in events]
    more = len(told) - 3
    return " + ".join(told[:3]) + (f" + {more} more" if more > 0 else "") or "nothing"


def _audit(method: Method, trials: int, seed: int | None, clipping: Clipping | None) -> Report:
    """The canaries' bounds beside the claim."""
    result = audit(method, trials=trials, seed=seed, confidence=CONFIDENCE, clipping=clipping)
    claimed = result.epsilon_claimed
    bounds = {"free of assumptions": result.epsilon_lower, "family": result.epsilon_lower_family}
    figures = {
        "epsilon_lower": result.epsilon_lower,
        "epsilon_lower_family": result.epsilon_lower_family,
        "epsilon_claimed": claimed,
        "trials": trials,
        "confidence": CONFIDENCE,
    }
    if claimed is None:
        reason = "the engine reports an infinite epsilon: there is no claim to attack"
        return Report("audit", figures=figures, not_applicable=reason)
    findings = []
    for name, lower in bounds.items():
        if lower is not None and lower > claimed:
            sentence = (
                f"the lower bound on epsilon ({name}) is {lower:.4g} at confidence "
                f"{CONFIDENCE:g}, above the claim of {claimed:.4g}."
            )
            findings.append(Finding("epsilon", sentence, None, lower, claimed))
    return Report("audit", tuple(findings), figures)
