"""The mechanism of a run in one paragraph, its sampler, and what one clipping group alone shows.

The words about a method come from its row in the catalogue: summary, guarantee and proof. The
numbers come from the plan and from the ledger's events.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from vestige.checks import finite
from vestige.methods import METHODS
from vestige.plan import PrivacyPlan
from vestige.privacy import accounting
from vestige.privacy.ledger import Event, merge
from vestige.statement.plain import charged_span, plain, shown, span

_DIRECTIONS = ("direction", "magnitude")  # what a geometry releases instead of a gradient

_SAMPLERS = {
    "poisson": (
        "Poisson lots: every record is in every lot independently with the sampling rate, so the "
        "size of a lot varies and is not published."
    ),
    "cyclic poisson": (
        "Cyclic Poisson lots: each record belongs to one of {bands} groups, chosen at random; the "
        "groups take turns, and a lot takes each record of its group independently. A cycle of "
        "the groups is charged as one Poisson draw at the rate of the events below."
    ),
    "fixed order": (
        "No sampling: the records come in one secret random order, the same in every epoch. "
        "Nothing is gained from sampling, and every event is charged at rate 1."
    ),
    "importance": (
        "Importance sampling: a Poisson superset at a rate that follows a released noisy "
        "normaliser, of which each record is accepted in proportion to its clipped gradient norm. "
        "Every lot is charged at the public cap of the rate, every normaliser at rate 1."
    ),
    "of the method": (
        "Lots as the method draws them; the events below say at which rate each was charged."
    ),
}
_CORRELATED = ("fractional-noise", "dp-ftrl")


def sampler(plan: PrivacyPlan) -> dict[str, Any]:
    """How records got into lots."""
    method = METHODS.get(plan.method)
    kind = method.sampler if method else "of the method"
    return {
        "kind": kind,
        "text": _SAMPLERS[kind].format(bands=plan.settings.get("bands")),
        "expected_lot": plan.batch_size,
        "sample_rate": span(plan.sample_rate),
        "records": plan.dataset_size,
        "records_declared": plan.size_declared,
    }


def mechanism(plan: PrivacyPlan, events: Sequence[Event], released: int) -> dict[str, Any]:
    """The method, its guarantee, and what one release of it is, with the numbers of this run."""
    method = METHODS.get(plan.method)
    proof = _proof(plan)
    sentences = [_one_release(plan, released)]
    if method is not None:
        sentences.append(f"Method {plan.method} ({method.paper}): {method.summary}.")
    else:
        sentences.append(f"Method {plan.method}, which is not one of Vestige's own.")
    if plan.private:
        sentences.append(f"Its argument: {proof}")
        sentences.append(_charged(plan, events))
        sentences.append(
            "What is done with a release afterwards (optimizer, memory, filter, average) is "
            "post-processing and costs nothing, as long as it looks at no private record."
        )
    else:
        sentences.append(f"It has no guarantee: {proof}")
    return {
        "method": plan.method,
        "paper": method.paper if method else None,
        "private": plan.private,
        "guarantee": method.guarantee if method else "of the method's own making",
        "settings": plain(plan.settings),
        "clipping": plan.clipping,
        "groups": list(plan.group_names),
        "clip_bounds": list(plan.bounds),
        "noise_stds": span(_flat(plan.noise_stds)),
        "count_noise": plan.count_noise,
        "text": " ".join(sentences),
    }


def _flat(stds: Sequence[Any]) -> list[float]:
    return [value for row in stds for value in (row if isinstance(row, tuple) else (row,))]


def _proof(plan: PrivacyPlan) -> str:
    """The method's argument, or else its one line."""
    method = METHODS.get(plan.method)
    if method is None:
        return "that of its own author; the events say what every release was charged."
    return method.proof or f"{method.guarantee}."


def _one_release(plan: PrivacyPlan, released: int) -> str:
    steps = f"Each of the {released} releases" if released != 1 else "The one release"
    noise = shown(span(_flat(plan.noise_stds)), 4)
    if plan.group_names == _DIRECTIONS:
        bounded = (
            "the gradient of every record's own loss is turned into a direction and a length, both "
            f"bounded (by {_list(plan.bounds)})"
        )
    else:
        bounded = f"the gradient of every record's own loss is {_clipped(plan)}"
    if plan.method == "geodp":
        return (
            f"{steps} is made from one lot: {bounded}, these are added up, and noise is added to "
            "the angles and the length of the sum."
        )
    kind = ", correlated from lot to lot, of base" if plan.method in _CORRELATED else " of"
    return (
        f"{steps} is made from one lot: {bounded}, these are added up, and Gaussian noise"
        f"{kind} standard deviation {noise} is added to every coordinate of the sum "
        "before anything leaves the engine."
    )


def _clipped(plan: PrivacyPlan) -> str:
    form, _, rest = plan.clipping.replace("count_noise None, ", "").partition(", ")
    groups = len(plan.bounds)
    where = "" if groups == 1 else f" in each of {groups} groups of parameters"
    bounds = _list(plan.bounds) if groups == 1 else shown(span(plan.bounds), 4)
    if form == "auto":
        return f"scaled{where} to a norm below {bounds} (automatic clipping: {rest})"
    if form == "quantile":
        return (
            f"clipped{where} to a norm of at most a bound that starts at {bounds} and follows "
            f"noisy counts of the unclipped records ({rest}; noise {plan.count_noise:g} on each "
            "count, part of the charge; the noise of a sum is in proportion to its bound)"
        )
    raw = plan.method == "dp-adam-ac"
    moves = " at first, and to a bound that follows the raw norms later" if raw else ""
    return f"clipped{where} to a norm of at most {bounds}{moves}"


def _charged(plan: PrivacyPlan, events: Sequence[Event]) -> str:
    sigma, charged = shown(span(plan.noise_multiplier)), charged_span(events)
    beta = span(plan.beta)
    share = "" if beta == {"smallest": 1.0, "largest": 1.0} else f" and beta = {shown(beta)}"
    if charged is None:
        return f"In this run sigma = {sigma}{share}; nothing was charged."
    return (
        f"In this run sigma = {sigma}{share}, and the effective multiplier that the releases were "
        f"charged at (sigma_eff) is {shown(charged)}."
    )


def _list(values: Sequence[float]) -> str:
    return " and ".join(f"{value:.4g}" for value in values)


def marginal(plan: PrivacyPlan, events: Sequence[Event], delta: float) -> dict[str, Any] | None:
    """What each group alone would cost by the papers' conversion; None where that says nothing.

    A diagnostic: a reader of the model sees all groups at once.
    """
    ratios = _ratios(plan)
    if ratios is None or plan.count_noise is not None or not plan.private or not events:
        return None
    rows = []
    for name, ratio in zip(plan.group_names, ratios, strict=True):
        own = [Event(e.sample_rate, e.noise_multiplier * ratio, e.count) for e in merge(events)]
        cost = accounting.epsilon(own, delta, "rdp_classic")
        rows.append({"group": name, "sigma_eff": charged_span(own), "epsilon": finite(cost)})
    return {"note": accounting.MARGINAL_NOTE, "accountant": "rdp_classic", "groups": rows}


def _ratios(plan: PrivacyPlan) -> list[float] | None:
    """Each group's own multiplier over the joint one, where several groups keep that ratio."""
    if len(plan.bounds) < 2 or isinstance(plan.noise_stds[0], tuple):
        return None
    joint = plan.noise_multiplier
    if isinstance(joint, tuple) or joint == 0:
        return None
    pairs = zip(_flat(plan.noise_stds), plan.bounds, strict=True)
    return [std / bound / joint for std, bound in pairs]
