"""From the public facts of a run to its statement: which number stands where."""

from __future__ import annotations

import difflib
import functools
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, ParamSpec

from pydantic import ValidationError

import vestige
from vestige.checks import as_json, finite
from vestige.errors import ConfigError, PrivacyError
from vestige.methods.catalogue import METHODS, MethodInfo
from vestige.plan import PrivacyPlan
from vestige.privacy import accounting
from vestige.privacy.composition import prepared
from vestige.privacy.ending import AS_PLANNED, GUARD, OPEN, PLANNED, Ending
from vestige.privacy.events import Event, counts, from_counts, merge
from vestige.privacy.ledger import Ledger
from vestige.privacy.selection import Selection
from vestige.statement import curves
from vestige.statement.model import Run, RunFacts, check, told
from vestige.statement.words import sentence, sentences

_Parameters = ParamSpec("_Parameters")
_PACKAGES = ("torch", "numpy", "scipy", "dp-accounting", "cryptography")
# What a statement must never hold, whoever hands it over.
_SECRET = ("noise_seed", "key", "generator_state")


@dataclass
class Claim:
    """What a statement is made from, and what follows from it.

    `events` are what this run was charged, `earlier` what other runs in the same ledger were:
    epsilon is that of both together, and the run alone is told beside it. `released` counts the
    releases that were made, `over_reported` those that were charged and lost in a crash. `ending`
    says what the claim counts beside them where the run was stopped early; without it each planned
    release that was not made counts like the costliest of `events`. `repeatable` says that this run
    was in test mode, `repeatable_before` that another one in the ledger was: the claim is over
    both. `run` are public facts (`model.RunFacts`); other names are kept as they are.

    Guarantee: every epsilon is an upper bound by the accountant that is named with it; infinite
    ones are null, with the reason in words. Nothing is computed from data.
    """

    plan: PrivacyPlan
    events: Sequence[Event]
    _: KW_ONLY
    delta: float
    accountant: str
    released: int
    repeatable: bool
    caveats: Sequence[str]
    run: Mapping[str, Any] | None = None
    earlier: Sequence[Event] = ()
    over_reported: int = 0
    ending: Ending | None = None
    repeatable_before: bool = False

    def __post_init__(self) -> None:
        self.accountant = accounting.accountant_name(self.accountant)
        accounting.epsilon((), self.delta, self.accountant)  # refuses a bad delta
        self.facts = _public_facts(self.run or {})
        end = self.ending or _costliest_end(self.plan, self.events, self.released, self.facts)
        self.end = end.on([*self.earlier, *self.events])
        own, limit = [*self.events, *self.end.unmade], self.end.limit
        self.counted = prepared([*self.earlier, *own])
        self.curve = curves.epsilon_curve(self.counted, self.delta, self.accountant, limit)
        self.epsilon = self.alone = dict(self.curve)[self.delta]
        if self.earlier and limit is None:
            self.alone = accounting.epsilon(own, self.delta, self.accountant)
        self.reason = None if math.isfinite(self.epsilon) else sentence("reason", self)
        seeded = self.repeatable or self.repeatable_before
        self.status = "none" if self.reason else "test mode" if seeded else "private"
        self.trade_off: list[curves.Point] = []
        if not self.reason:
            self.trade_off = curves.trade_off(self.counted, self.accountant, self.curve, limit)

    @property
    def unit(self) -> str:
        """What the guarantee protects: a record, or a user with all rows."""
        return "record" if self.plan.rows_per_unit is None else "user"

    @property
    def plain(self) -> bool:
        """Whether all that counts are single Gaussian releases of Poisson lots, of this run alone:
        no correlated noise, no importance sampling, no second look, nothing beside the sum."""
        method, plan = self.method, self.plan
        if (
            self.search is not None
            or method is None
            or (method.sampler, method.noise) != ("poisson", "white")
        ):
            return False
        if method.touches > 1 or plan.count_noise is not None or self.earlier or self.end.limit:
            return False
        sigmas, betas = (_many(table) for table in (plan.noise_multiplier, plan.beta))
        expected = {sigma / beta for sigma in sigmas for beta in betas}
        charged = {event.noise_multiplier for event in (*self.events, *self.end.unmade)}
        return all(any(math.isclose(z, e, rel_tol=1e-9) for e in expected) for z in charged)

    @property
    def search(self) -> Selection | None:
        """The private search that this run is the winner of, if it is one."""
        return next((event.selection for event in self.events if event.selection), None)

    @property
    def method(self) -> MethodInfo | None:
        """The method, where it is one of Vestige's own."""
        return METHODS.get(self.plan.method)

    def statement(self) -> dict[str, Any]:
        """The statement as strict JSON types."""
        elsewhere = RunFacts.model_fields.keys() - Run.model_fields
        parts = {
            "statement": "vestige privacy statement",
            "version": 1,
            "status": self.status,
            "headline": sentence("headline", self),
            "warnings": sentences("warnings", self),
            "guarantee": _guarantee(self),
            "unit": _unit(self),
            "covered": [] if self.reason else sentences("covered", self),
            "not_covered": [
                dict(zip(("what", "text"), entry.split(": ", 1), strict=True))
                for entry in sentences("not_covered", self)
            ],
            "assumptions": sentences("assumptions", self),
            "calibration": _calibration(self),
            "curve": {
                "accountant": self.accountant,
                "points": [{"delta": d, "epsilon": finite(e)} for d, e in self.curve],
            },
            "trade_off": {
                "note": f"lower bounds on the misses of any test for one {self.unit}",
                "points": [{"false_alarms": a, "misses_at_least": b} for a, b in self.trade_off],
            },
            "gaussian_dp": _gaussian_dp(self),
            "mechanism": _mechanism(self),
            "sampler": _sampler(self),
            "ledger": _ledger(self),
            "marginal": _marginal(self),
            "caveats": [str(caveat) for caveat in self.caveats],
            "run": self.facts.model_dump(exclude_unset=True, exclude=elsewhere),
            "versions": versions() | self.facts.versions,
        }
        return check(parts).model_dump(exclude_unset=True)


def _built(claim: Callable[_Parameters, Claim]) -> Callable[_Parameters, dict[str, Any]]:
    """The parameters of a statement are the fields of a claim, declared once."""

    @functools.wraps(claim)
    def build(*args: _Parameters.args, **facts: _Parameters.kwargs) -> dict[str, Any]:
        return claim(*args, **facts).statement()

    return build


build = _built(Claim)


def _public_facts(run: Mapping[str, Any]) -> RunFacts:
    """The facts of a run, without what must not be published."""
    facts = as_json(run, _described)
    for name in _SECRET:
        if name in facts:
            raise PrivacyError(
                f"run facts hold {name!r}, which is a secret of the run: a statement is made to be "
                "published. Leave it out."
            )
    for name in facts.keys() - RunFacts.model_fields:
        near = difflib.get_close_matches(name, RunFacts.model_fields, n=1, cutoff=0.8)
        if near:
            raise ConfigError(
                f"the run's fact {name} is not one that a statement knows: did you mean {near[0]}? "
                "A fact of your own needs a name that is less like it."
            )
    if isinstance(facts.get("dataset"), str):
        facts["dataset"] = Path(facts["dataset"]).name  # not where its file lay
    try:
        return RunFacts.model_validate(facts)
    except ValidationError as error:
        raise ConfigError(
            f"the run's fact {told(error)}. Give it in that form, or under another name."
        ) from error


def _costliest_end(
    plan: PrivacyPlan, events: Sequence[Event], released: int, facts: RunFacts
) -> Ending:
    """The ending of a run of which only this is known."""
    if plan.steps is None or released > plan.steps:
        return Ending(OPEN)
    missing = plan.steps - released
    if missing == 0 or not events:
        return Ending(AS_PLANNED)
    if facts.stopped_by == GUARD:
        return Ending(GUARD)
    rates, noises = [e.sample_rate for e in events], [e.noise_multiplier for e in events]
    return Ending(PLANNED, (Event(max(rates), min(noises), missing),))


def _guarantee(claim: Claim) -> dict[str, Any]:
    by_accountant = {
        name: claim.epsilon
        if claim.end.limit
        else curves.epsilons(claim.counted, [claim.delta], name)[0]
        for name in accounting.ACCOUNTANTS
    }
    facts = {"released": claim.released, "planned": claim.plan.steps, "search": claim.search}
    end = {"kind": claim.end.kind, "text": sentence("ended", claim.end, **facts)}
    return {
        "kind": accounting.guarantee(claim.epsilon, claim.plan.adjacency),
        "epsilon": finite(claim.epsilon),
        "delta": claim.delta,
        "accountant": claim.accountant,
        "by_accountant": {name: finite(bound) for name, bound in by_accountant.items()},
        "this_run_alone": finite(claim.alone),
        "end": end,
        "reason": claim.reason,
        "meaning": [] if claim.reason else sentences("meaning", claim),
    }


def _unit(claim: Claim) -> dict[str, Any]:
    bounds = curves.of_several_records(
        claim.counted, claim.delta, claim.end.limit, claim.plain and claim.accountant == "pld"
    )
    return {
        "record": sentence("unit", claim),
        "adjacency": claim.plan.adjacency,
        "compared": sentence("compared", claim),
        "several_records": sentence("several_records", claim),
        "groups": [
            {"records": records, "delta": claim.delta, "epsilon": finite(bound)}
            for records, bound in bounds.items()
        ],
    }


def _calibration(claim: Claim) -> dict[str, Any]:
    return {
        "how": sentence("calibration", claim),
        "target_epsilon": claim.facts.target_epsilon,
        "max_epsilon": claim.facts.max_epsilon,
        "planned_epsilon": claim.facts.planned_epsilon,
        "planned_steps": claim.plan.steps,
        "accountant": claim.accountant,
        "noise_multiplier": _span(claim.plan.noise_multiplier),
        "beta": _span(claim.plan.beta),
        "sigma_eff": _span(_charged(claim.events)),
    }


def _gaussian_dp(claim: Claim) -> dict[str, Any]:
    points = [] if claim.reason or not claim.counted else claim.curve
    mus = {delta: curves.gaussian_mu(delta, e) for delta, e in points if math.isfinite(e)}
    return {
        "mu": mus.get(claim.delta),
        "approximate": True,
        "at_delta": claim.delta,
        "over_curve": _span(list(mus.values())),
        "note": sentence("gaussian_dp", claim),
    }


def _mechanism(claim: Claim) -> dict[str, Any]:
    plan, method = claim.plan, claim.method
    about = {"stds": _flat(plan.noise_stds), "charged": _charged(claim.events)}
    return {
        "method": plan.method,
        "paper": method.paper if method else None,
        "private": plan.private,
        "guarantee": method.guarantee if method else "of the method's own making",
        "settings": as_json(plan.settings, _described),
        "clipping": plan.clipping,
        "groups": plan.group_names,
        "clip_bounds": plan.bounds,
        "noise_stds": _span(about["stds"]),
        "count_noise": plan.count_noise,
        "text": sentence(
            "mechanism", claim, proof=method and (method.proof or f"{method.guarantee}."), **about
        ),
    }


def _sampler(claim: Claim) -> dict[str, Any]:
    plan = claim.plan
    kind = claim.method.sampler if claim.method else "of the method"
    return {
        "kind": kind,
        "text": sentence("sampler", claim, kind=kind),
        "expected_lot": plan.batch_size,
        "sample_rate": _span(plan.sample_rate),
        "records": plan.dataset_size,
        "records_declared": plan.size_declared,
    }


def _ledger(claim: Claim) -> dict[str, Any]:
    kinds = {"events": claim.events, "earlier": claim.earlier, "unmade": claim.end.unmade}
    return {
        **{kind: Ledger.of(events).state_dict()["events"] for kind, events in kinds.items()},
        "charged": sum(event.count for event in claim.events),
        "released": claim.released,
        "over_reported": claim.over_reported,
    }


def _marginal(claim: Claim) -> dict[str, Any] | None:
    """What each group alone would cost by the papers' conversion; None where that says nothing.

    A diagnostic: a reader of the model sees all groups at once.
    """
    plan, joint = claim.plan, claim.plan.noise_multiplier
    if len(plan.bounds) < 2 or isinstance(plan.noise_stds[0], tuple) or isinstance(joint, tuple):
        return None
    if joint == 0 or plan.count_noise is not None or not plan.private or not claim.events:
        return None
    if claim.search is not None:
        return None
    groups = []
    for name, std, bound in zip(plan.group_names, _flat(plan.noise_stds), plan.bounds, strict=True):
        ratio = std / bound / joint  # of the group's own multiplier to the joint one
        charged = [
            Event(e.sample_rate, e.noise_multiplier * ratio, e.count) for e in merge(claim.events)
        ]
        cost = accounting.epsilon(charged, claim.delta, "rdp_classic")
        groups.append(
            {"group": name, "sigma_eff": _span(_charged(charged)), "epsilon": finite(cost)}
        )
    return {"note": accounting.MARGINAL_NOTE, "accountant": "rdp_classic", "groups": groups}


def without(events: Sequence[Event], others: Sequence[Event]) -> list[Event]:
    """The events that are left when the charges of `others` are taken out, never fewer than that.

    A charge of `others` that is not among `events` takes nothing away.
    """
    return list(from_counts(counts(events) - counts(others)))


def versions(packages: Sequence[str] = _PACKAGES) -> dict[str, str]:
    """The versions of what the numbers depend on."""
    installed = {"vestige": vestige.__version__, "python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed[package] = "not installed"
    return installed


def _described(value: Any) -> str:
    """What JSON has no type for: a representation may hold anything, the name of a class nothing.

    A path is its last part: where files lay is not published.
    """
    return value.name if isinstance(value, Path) else f"<{type(value).__name__}>"


def _flat(stds: Sequence[Any]) -> list[float]:
    """The noise of every group, at every step where it follows a schedule."""
    return [std for row in stds for std in (row if isinstance(row, tuple) else (row,))]


def _span(values: float | Sequence[float]) -> dict[str, float] | None:
    """The smallest and the largest value of a number or of a schedule; None where there is none."""
    many = _many(values)
    return {"smallest": float(min(many)), "largest": float(max(many))} if many else None


def _many(values: float | Sequence[float]) -> Sequence[float]:
    """The values of a schedule, or the one that there is."""
    return values if isinstance(values, list | tuple) else (values,)


def _charged(events: Sequence[Event]) -> list[float]:
    """The finite multipliers that were charged."""
    return [noise for e in events for noise in e.multipliers if math.isfinite(noise)]
