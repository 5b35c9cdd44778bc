"""Verify a method class: the replay, rows, the law of the noise, the lots, the canaries' attack.

`load("MODULE:factory")` finds the method, `verify(method)` runs every check that Vestige runs on
its own methods, on the real engine with small data of its own:

    claim    it claims a guarantee, and what it plans to be charged is what a run is charged
    replay   a neighbouring data set changes nothing but the sums, and those within the bound
    rows     a record moves its own clipped gradient and nothing else, however rows are folded;
             of the engine, with any method
    noise    the noise of releases has the law that the ledger was charged for
    lots     lots are drawn as they are charged
    audit    canaries: no empirical lower bound on epsilon above the claim

Guarantee: none. A failure is a counterexample (replay, rows, claim) or evidence at the stated rate
of false alarms (noise, lots, audit). A pass says that these attacks found nothing.
"""

from __future__ import annotations

import importlib
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vestige.audit import lots_check, noise_check, replay, rows_check
from vestige.audit.findings import Finding, Report
from vestige.audit.observation import SETTING, Observation
from vestige.errors import ConfigError
from vestige.gradients.clipping import Clipping
from vestige.methods import Method, planned_charges
from vestige.privacy.accounting import events_of
from vestige.privacy.ledger import Event, merge

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
    def passed(self) -> bool:
        """No check found anything."""
        return all(report.passed for report in self.reports)

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
    method: Method,
    *,
    trials: int = TRIALS,
    seed: int | None = None,
    quick: bool = False,
    clipping: Clipping | None = None,
    tell: Callable[[str], None] = lambda check: None,
) -> Verdict:
    """Run every check on `method`. `quick` takes fewer releases and canaries.

    With `seed` everything repeats itself; without it keys, noise and canaries' coins are the
    operating system's. `clipping` takes the place of the method's own. `tell` is told which check
    is under way.
    """
    begun = time.perf_counter()
    seen: list[Observation] = []
    steps = QUICK_STEPS if quick else SETTING.steps

    def observed() -> list[Observation]:
        if not seen:
            seen.extend(noise_check.observations(method, steps, seed, clipping))
        return seen

    canaries = min(trials, QUICK_TRIALS) if quick else trials
    checks: dict[str, Callable[[], Report]] = {
        "claim": lambda: _claim(method, observed),
        "replay": lambda: replay.examine(method, clipping=clipping),
        "rows": rows_check.examine,
        "noise": lambda: noise_check.examine(observed()),
        "lots": lambda: lots_check.examine(observed()[0]),
        "audit": lambda: _audit(method, canaries, seed, clipping),
    }
    reports = []
    for name in CHECKS:
        tell(name)
        reports.append(_carried_out(name, checks[name]))
    shown = method.name or type(method).__name__
    seconds = time.perf_counter() - begun
    return Verdict(shown, tuple(reports), seconds, seed is not None)


def _carried_out(name: str, check: Callable[[], Report]) -> Report:
    """A check that cannot be carried out has not passed."""
    try:
        return check()
    except Exception as error:
        return Report(
            name,
            (
                Finding(
                    "could not run",
                    f"the check stopped with {type(error).__name__}: {_line(error)}",
                ),
            ),
        )


def _claim(method: Method, observed: Callable[[], list[Observation]]) -> Report:
    """Whether there is a claim, and whether what was planned is what was charged."""
    if not method.private:
        sentence = f"the method says itself that it is not private ({method.guarantee})."
        return Report("claim", (Finding("no claim", sentence),))
    one = observed()[0]
    charged = merge(Event(*charge) for look in one.whole.looks for charge in look.charges)
    plan = one.plan
    counts = one.whole.sums[0].counts
    planned = planned_charges(
        method.tabulated(one.setting.steps),
        method.clipping if one.setting.clipping is None else one.setting.clipping,
        1 if counts is None else counts.numel(),
        plan.dataset_size,
        plan.batch_size,
        plan.batch_size / plan.dataset_size,
        one.setting.steps,
    )
    expected = merge(events_of(planned, one.setting.noise_multiplier))
    figures = {"guarantee": method.guarantee, "events": len(charged)}
    if _alike(charged, expected):
        return Report("claim", figures=figures)
    sentence = (
        f"a run of {one.setting.steps} steps plans to be charged {_told(expected)} and is charged "
        f"{_told(charged)}: a target epsilon would be missed."
    )
    return Report("claim", (Finding("planned charges", sentence),), figures)


def _alike(found: tuple[Event, ...], expected: tuple[Event, ...]) -> bool:
    if [event.count for event in found] != [event.count for event in expected]:
        return False
    pairs = zip(found, expected, strict=True)
    return all(
        abs(a.sample_rate / b.sample_rate - 1) < 1e-9
        and abs(a.noise_multiplier - b.noise_multiplier) <= 1e-9 * b.noise_multiplier
        for a, b in pairs
    )


def _told(events: tuple[Event, ...]) -> str:
    told = [f"{e.count} x (rate {e.sample_rate:.4g}, {e.noise_multiplier:.4g})" for e in events]
    more = len(told) - 3
    return " + ".join(told[:3]) + (f" + {more} more" if more > 0 else "") or "nothing"


def _audit(method: Method, trials: int, seed: int | None, clipping: Clipping | None) -> Report:
    """The canaries' bounds beside the claim."""
    from vestige.audit.canary import audit

    result = audit(method, trials=trials, seed=seed, confidence=CONFIDENCE, clipping=clipping)
    claimed = result.epsilon_claimed
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
    bounds = {
        "free of assumptions": result.epsilon_lower,
        "family": result.epsilon_lower_family,
    }
    findings = [
        Finding(
            "epsilon",
            f"the lower bound on epsilon ({name}) is {found:.4g} at confidence {CONFIDENCE:g}, "
            f"above the claim of {claimed:.4g}.",
            figure=found,
            bound=claimed,
        )
        for name, found in bounds.items()
        if found is not None and found > claimed
    ]
    return Report("audit", tuple(findings), figures)


def load(target: str) -> Method:
    """The method that "MODULE:factory" makes; ConfigError with one line where there is none.

    The module is looked for in the current folder first. The factory is a function without
    arguments that returns a Method or a subclass of it, or such a subclass itself.
    """
    module_name, colon, attribute = target.partition(":")
    if not colon or not module_name or not attribute:
        raise ConfigError(
            f"{target!r} is not of the form MODULE:factory: for example my_methods:MyMethod."
        )
    made: Any = _found(module_name, attribute)
    if not isinstance(made, Method):
        if not callable(made):
            raise ConfigError(
                f"{target!r} is a {type(made).__name__}, which cannot be called: name a function "
                "without arguments that returns a vestige.methods.Method."
            )
        made = _called(target, made)
        if isinstance(made, type) and issubclass(made, Method):
            made = _called(target, made)
    if not isinstance(made, Method):
        raise ConfigError(
            f"{target!r} returned a {type(made).__name__}: return an instance of a subclass of "
            "vestige.methods.Method."
        )
    return made


def _found(module_name: str, attribute: str) -> Any:
    try:
        with _current_folder_first():
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name + ".").startswith(error.name + "."):
            raise ConfigError(
                f"module {module_name!r} was not found: run this in the folder that holds it, or "
                "install it."
            ) from None
        raise ConfigError(f"module {module_name!r} needs another: {_line(error)}.") from error
    except Exception as error:
        raise ConfigError(
            f"module {module_name!r} could not be imported: {type(error).__name__}: {_line(error)}"
        ) from error
    if not hasattr(module, attribute):
        raise ConfigError(f"module {module_name!r} has no {attribute!r}: name what it defines.")
    return getattr(module, attribute)


def _called(target: str, factory: Callable[[], Any]) -> Any:
    try:
        return factory()
    except Exception as error:
        raise ConfigError(f"{target!r} raised {type(error).__name__}: {_line(error)}") from error


@contextmanager
def _current_folder_first() -> Iterator[None]:
    folder = str(Path.cwd())
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        if folder in sys.path:
            sys.path.remove(folder)


def _line(error: BaseException) -> str:
    """An error's message on one line."""
    return " ".join(str(error).split()) or "without a message"
