"""Putting a statement together from the public facts of a run."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping, Sequence
from importlib import metadata
from typing import Any

import vestige
from vestige.checks import finite, round_up
from vestige.methods import METHODS
from vestige.plan import PrivacyPlan
from vestige.privacy import accounting
from vestige.privacy.ending import AS_PLANNED, GUARD, OPEN, PLANNED, Ending
from vestige.privacy.ledger import Event, merge
from vestige.statement import coverage, curves
from vestige.statement.mechanism import marginal, mechanism, sampler
from vestige.statement.plain import charged_span, event_rows, plain, public_facts, span

NAME, VERSION = "vestige privacy statement", 1
PRIVATE, TEST_MODE, NONE = "private", "test mode", "none"
_WEAK = 10.0  # an epsilon of this or more protects little
_PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "cryptography")
# Facts of a run that have a place of their own in the statement.
_PLACED = ("versions", "tuning", "target_epsilon", "max_epsilon", "planned_epsilon")


def build(
    plan: PrivacyPlan,
    events: Sequence[Event],
    *,
    delta: float,
    accountant: str,
    released: int,
    repeatable: bool,
    caveats: Sequence[str],
    run: Mapping[str, Any] | None = None,
    earlier: Sequence[Event] = (),
    over_reported: int = 0,
    ending: Ending | None = None,
    repeatable_before: bool = False,
) -> dict[str, Any]:
    """The statement of a run as strict JSON types.

    `events` are what this run was charged, `earlier` what other runs in the same ledger were:
    epsilon is that of both together, and the run alone is told beside it. `released` counts the
    releases that were made, `over_reported` those that were charged and lost in a crash. `ending`
    says what the claim counts beside them where the run was stopped early; without it each planned
    release that was not made counts like the costliest of `events`. `repeatable` says that this run
    was in test mode, `repeatable_before` that another one in the ledger was: the claim is over
    both.

    `run` are public facts: dataset, model, parameters, optimizer, lr, seed, device, date, classes,
    classes_inferred, interrupted, stopped_by ("budget guard" where that ended the run), held_out
    (names of figures measured on held-out data), outside_guarantee (names of figures computed on
    training records), tuning (a sentence), target_epsilon, max_epsilon, planned_epsilon, versions;
    other names are kept as they are.

    Guarantee: every epsilon is an upper bound by the accountant that is named with it; infinite
    ones are null, with the reason in words. Nothing is computed from data.
    """
    name = accounting.accountant_name(accountant)
    accounting.epsilon((), delta, name)  # refuses a bad delta
    facts = public_facts(run)
    end = _ending(plan, events, released, facts) if ending is None else ending
    own = [*events, *end.unmade]
    everything = curves.prepared([*earlier, *own])
    curve = curves.epsilon_curve(everything, delta, name, end.limit)
    epsilon = dict(curve)[delta]
    alone = accounting.epsilon(own, delta, name) if earlier and not end.limit else epsilon
    reason = None if math.isfinite(epsilon) else _reason(plan, alone)
    status = NONE if reason else TEST_MODE if repeatable or repeatable_before else PRIVATE
    described = mechanism(plan, events, released)
    trade_off = curves.trade_off(everything, name, curve, end.limit) if not reason else []
    return {
        "statement": NAME,
        "version": VERSION,
        "status": status,
        "headline": _headline(
            plan, status, epsilon, delta, len(earlier) > 0, reason, _whose(repeatable)
        ),
        "warnings": _warnings(
            plan, status, epsilon, delta, repeatable or repeatable_before, facts, released, end
        ),
        "guarantee": {
            "kind": accounting.guarantee(epsilon, plan.adjacency),
            "epsilon": finite(epsilon),
            "delta": float(delta),
            "accountant": name,
            "by_accountant": {
                each: finite(
                    epsilon if end.limit else curves.epsilons(everything, [delta], each)[0]
                )
                for each in accounting.ACCOUNTANTS
            },
            "this_run_alone": finite(alone),
            "end": {"kind": end.kind, "text": end.text(released, plan.steps)},
            "reason": reason,
            "meaning": _meaning(epsilon, delta, trade_off) if not reason else [],
        },
        "unit": {**coverage.unit(plan), "groups": _groups(everything, delta, end)},
        "covered": coverage.covered() if not reason else [],
        "not_covered": coverage.not_covered(plan, facts, repeatable, repeatable_before),
        "assumptions": coverage.assumptions(),
        "calibration": _calibration(plan, events, facts, name, delta),
        "curve": {
            "accountant": name,
            "points": [{"delta": d, "epsilon": finite(e)} for d, e in curve],
        },
        "trade_off": {
            "note": "lower bounds on the misses of any test for one record",
            "points": [{"false_alarms": a, "misses_at_least": b} for a, b in trade_off],
        },
        "gaussian_dp": _gaussian(delta, epsilon, curve, bool(everything)),
        "mechanism": described,
        "sampler": sampler(plan),
        "ledger": {
            "events": event_rows(events),
            "earlier": event_rows(earlier),
            "unmade": event_rows(end.unmade),
            "charged": sum(event.count for event in events),
            "released": released,
            "over_reported": over_reported,
        },
        "marginal": marginal(plan, events, delta),
        "caveats": [str(caveat) for caveat in caveats],
        "run": {key: value for key, value in facts.items() if key not in _PLACED},
        "versions": {**_versions(), **facts.get("versions", {})},
    }


def _whose(repeatable: bool) -> str:
    """Which noise came from a chosen seed, where some did."""
    return "lots and noise" if repeatable else "lots and noise of an earlier run in the ledger"


def without(events: Sequence[Event], others: Sequence[Event]) -> list[Event]:
    """The events that are left when the charges of `others` are taken out, never fewer than that.

    A charge of `others` that is not among `events` takes nothing away.
    """
    taken = {(e.sample_rate, e.noise_multiplier): e.count for e in merge(others)}
    left = []
    for event in merge(events):
        count = event.count - taken.get((event.sample_rate, event.noise_multiplier), 0)
        if count > 0:
            left.append(Event(event.sample_rate, event.noise_multiplier, count))
    return left


def _reason(plan: PrivacyPlan, alone: float) -> str:
    """Why epsilon is infinite."""
    if math.isfinite(alone):
        return "an earlier release in the same ledger has no guarantee"
    if not plan.private:
        method = METHODS.get(plan.method)
        own = method.guarantee if method else "its author says so"
        return f"method {plan.method} is {own}" if own.startswith("not ") else own
    if plan.count_noise == 0:
        return "the counts of quantile clipping were released without noise"
    return "at least one release was made without noise, or with next to none"


def _headline(
    plan: PrivacyPlan,
    status: str,
    epsilon: float,
    delta: float,
    composed: bool,
    reason: str | None,
    seeded: str,
) -> str:
    if reason:
        return (
            f"NO PRIVACY GUARANTEE: {reason}. Epsilon is infinite: the model may reveal any of its "
            "training records."
        )
    scope = "This run, together with what its ledger held before," if composed else "This run"
    claim = (
        f"{scope} is (epsilon, delta)-differentially private with epsilon = {round_up(epsilon, 3)} "
        f"at delta = {delta:g}. Neighbouring data: {plan.adjacency}."
    )
    if status == TEST_MODE:
        return (
            f"TEST MODE, NOT FOR RELEASE: {seeded} came from a chosen seed, and nothing of that is "
            f"protected from anyone who knows or guesses it. For everybody else: {claim}"
        )
    return claim


def _warnings(
    plan: PrivacyPlan,
    status: str,
    epsilon: float,
    delta: float,
    repeatable: bool,
    facts: Mapping[str, Any],
    released: int,
    end: Ending,
) -> list[str]:
    found = []
    if status == NONE and repeatable:
        found.append("Lots and noise also came from a chosen seed (test mode).")
    if status != NONE and epsilon >= _WEAK:
        found.append(
            f"An epsilon of {_WEAK:g} or more protects little on its own: the formal bound lets an "
            f"observer's odds change by a factor of e^{round_up(epsilon, 1)}."
        )
    if delta * plan.dataset_size >= 1:
        found.append(
            f"Delta {delta:g} is not below 1 / records ({1 / plan.dataset_size:.3g}): it would "
            "allow a whole record to be published. Read the curve at a smaller delta."
        )
    if facts.get("outside_guarantee"):
        found.append(
            "The run folder holds figures computed on training records without noise: "
            f"{', '.join(map(str, facts['outside_guarantee']))}. Remove them before sharing it."
        )
    if released == 0:
        found.append("Nothing was released: the model still has its initial weights.")
    elif end.kind != AS_PLANNED and status != NONE:
        found.append(end.text(released, plan.steps))
    return found


def _ending(
    plan: PrivacyPlan, events: Sequence[Event], released: int, facts: Mapping[str, Any]
) -> Ending:
    """The ending of a run of which only this is known."""
    if plan.steps is None or released > plan.steps:
        return Ending(OPEN)
    missing = plan.steps - released
    if missing == 0 or not events:
        return Ending(AS_PLANNED)
    if facts.get("stopped_by") == GUARD:
        return Ending(GUARD)
    rates, noises = [e.sample_rate for e in events], [e.noise_multiplier for e in events]
    return Ending(PLANNED, (Event(max(rates), min(noises), missing),))


def _meaning(epsilon: float, delta: float, trade_off: Sequence[tuple[float, float]]) -> list[str]:
    odds = f"{math.exp(epsilon):.3g}" if epsilon < 700 else f"e^{round_up(epsilon, 1)}"
    found = [
        "For any two neighbouring datasets and any set of outcomes, the probability of the "
        f"outcomes on one is at most e^{round_up(epsilon, 3)} (about {odds}) times that on the "
        f"other, plus {delta:g}."
    ]
    by_alarm = dict(trade_off)
    if 0.01 in by_alarm:
        caught = round_up(100 * (1 - by_alarm[0.01]), 1)
        found.append(
            "Whoever tests whether a given record was used, and would say yes with a chance of at "
            f"most 1 % if it was not, says yes with a chance of at most {caught} % if it was."
        )
    return found


def _groups(events: Sequence[Event], delta: float, end: Ending) -> list[dict[str, Any]]:
    """Bounds for several records of one person together."""
    bounds = curves.of_several_records(events, delta, end.limit)
    return [
        {"records": records, "delta": float(delta), "epsilon": finite(bound)}
        for records, bound in bounds.items()
    ]


def _calibration(
    plan: PrivacyPlan,
    events: Sequence[Event],
    facts: Mapping[str, Any],
    accountant: str,
    delta: float,
) -> dict[str, Any]:
    target, guard = facts.get("target_epsilon"), facts.get("max_epsilon")
    if target is None:
        how = "The noise multiplier was given; epsilon follows from it and from the releases made."
    else:
        how = (
            f"The noise multiplier was solved for before the first lot: the smallest one, within "
            f"0.1 %, at which accountant {accountant} gives the {plan.steps} planned releases an "
            f"epsilon of at most {target:g} at delta {delta:g}. The same accountant makes the "
            "claim."
        )
    if guard is not None:
        how += f" A budget guard stops the run before epsilon would exceed {guard:g}."
    return {
        "how": how,
        "target_epsilon": target,
        "max_epsilon": guard,
        "planned_epsilon": facts.get("planned_epsilon"),
        "planned_steps": plan.steps,
        "accountant": accountant,
        "noise_multiplier": span(plan.noise_multiplier),
        "beta": span(plan.beta),
        "sigma_eff": charged_span(events),
    }


def _gaussian(
    delta: float, epsilon: float, curve: Sequence[tuple[float, float]], any_event: bool
) -> dict[str, Any]:
    note = (
        "approximate: the mu whose Gaussian mechanism has the claimed delta at the claimed "
        "epsilon. The run is not exactly mu-GDP; over the curve the matching mu lies in the range "
        "given"
    )
    mus = [curves.gaussian_mu(d, e) for d, e in curve if math.isfinite(e)] if any_event else []
    known = math.isfinite(epsilon) and any_event
    return {
        "mu": curves.gaussian_mu(delta, epsilon) if known else None,
        "approximate": True,
        "at_delta": float(delta),
        "over_curve": span(mus) if known and mus else None,
        "note": note,
    }


def _versions() -> dict[str, str]:
    """The versions of what the numbers depend on."""
    found = {"vestige": vestige.__version__, "python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return plain(found)  # type: ignore[no-any-return]
