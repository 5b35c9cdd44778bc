"""The privacy statement: its numbers are bounds, its words are true, its JSON fits the schema."""

from __future__ import annotations

import copy
import fnmatch
import itertools
import json
import math
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from scipy.stats import norm
from torch.utils.data import DataLoader, TensorDataset
from typer.testing import CliRunner, Result

from tests.support import small_runs
from vestige import PrivacyEngine, statement
from vestige.cli import statement as cli_statement
from vestige.cli.app import _Program
from vestige.errors import ConfigError, PrivacyError
from vestige.methods import METHODS
from vestige.plan import PrivacyPlan
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.statement import curves

SAMPLERS = {
    "Poisson": "poisson",
    "CyclicPoisson": "cyclic poisson",
    "FixedOrder": "fixed order",
    "Importance": "importance",
}
# Event sets of every kind: sampled, unsampled, mixed, a schedule, hardly any and hardly no noise.
EVENTS = {
    "sampled": [Event(0.05, 1.1, 200)],
    "unsampled": [Event(1.0, 4.0, 3)],
    "mixed": [Event(1.0, 50.0, 2), Event(0.02, 0.8, 100)],
    "schedule": [Event(0.1, 1 + step / 5, 4) for step in range(6)],
    "quiet": [Event(0.01, 40.0, 10)],
    "loud": [Event(0.5, 0.3, 20)],
    "silent": [Event(0.1, math.inf, 3)],
}


def plan_of(**changes: Any) -> PrivacyPlan:
    values: dict[str, Any] = {
        "method": "dp-sgd",
        "dataset_size": 1000,
        "size_declared": False,
        "batch_size": 50,
        "sample_rate": 0.05,
        "clipping": "flat",
        "group_names": ("all",),
        "bounds": (1.0,),
        "noise_multiplier": 1.1,
        "noise_stds": (1.1,),
        "steps": 200,
    }
    return PrivacyPlan(**values | changes)


def made(events: list[Event] | None = None, **changes: Any) -> dict[str, Any]:
    """A statement of a run of DP-SGD, with some of its facts changed."""
    options: dict[str, Any] = {
        "delta": 1e-5,
        "accountant": "rdp",
        "released": 200,
        "repeatable": False,
        "caveats": [],
    }
    plan = changes.pop("plan", plan_of())
    charged = EVENTS["sampled"] if events is None else events
    return statement.build(plan, charged, **options | changes)


# -- every method ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", list(METHODS))
def test_every_method_has_a_statement_that_fits_the_schema(name: str) -> None:
    engine, model, optimizer, loader = small_runs.private(name, steps=4)
    small_runs.run(engine, model, optimizer, loader, steps=4)
    found = engine.statement(1e-5)
    statement.check(found)
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    epsilon = engine.get_epsilon(1e-5)
    assert found["guarantee"]["epsilon"] == (epsilon if math.isfinite(epsilon) else None)
    assert found["guarantee"]["kind"] == accounting.guarantee(epsilon, engine.plan.adjacency)
    drawing = type(engine._run.lots._drawing).__name__  # type: ignore[union-attr]
    assert found["sampler"]["kind"] == SAMPLERS[drawing]
    assert found["ledger"]["released"] == engine.released
    assert sum(row["count"] for row in found["ledger"]["events"]) == engine.ledger.steps
    text = found["mechanism"]["text"]
    assert METHODS[name].summary in text
    assert "{" not in text and "  " not in text
    page = statement.markdown(found)
    assert page.startswith("# Privacy statement\n\n**")
    assert "None" not in page.replace("count_noise None", "")  # a part of the plan's own words
    if METHODS[name].private:
        assert found["status"] == "test mode"
        sigma = engine.plan.noise_multiplier
        shown = "between 0.8 and 1.6" if isinstance(sigma, tuple) else f"{sigma:.6g}"
        assert f"In this run sigma = {shown}" in text
    else:
        assert found["status"] == "none"
        assert METHODS[name].guarantee in found["headline"]


@pytest.mark.parametrize("name", ["geodp", "dp-adam-ac"])
def test_a_method_without_guarantee_says_so_first_and_is_not_for_signature(name: str) -> None:
    engine, model, optimizer, loader = small_runs.private(name)
    small_runs.run(engine, model, optimizer, loader, steps=2)
    found = engine.statement(1e-5)
    page = statement.markdown(found)
    first = page.split("\n\n")[1]
    assert first.startswith("**NO PRIVACY GUARANTEE")
    assert "not private as published" in first
    assert found["guarantee"]["epsilon"] is None
    assert found["guarantee"]["by_accountant"] == dict.fromkeys(accounting.ACCOUNTANTS)
    assert found["covered"] == found["trade_off"]["points"] == []
    assert found["gaussian_dp"]["mu"] is None
    assert "Not for signature" in page and "- [ ]" not in page
    assert any("chosen seed" in warning for warning in found["warnings"])


def test_repeatable_noise_is_said_first_and_is_not_for_signature() -> None:
    found = made(repeatable=True)
    page = statement.markdown(found)
    assert page.split("\n\n")[1].startswith("**TEST MODE, NOT FOR RELEASE")
    assert found["status"] == "test mode"
    assert "Not for signature" in page and "- [ ]" not in page
    plain = made()
    assert plain["status"] == "private"
    assert "TEST MODE" not in statement.markdown(plain)
    assert "- [ ]" in statement.markdown(plain)


def test_an_engine_of_ones_own_has_a_statement() -> None:
    model = torch.nn.Linear(3, 2)
    data = TensorDataset(torch.randn(40, 3), torch.zeros(40, dtype=torch.long))
    engine = PrivacyEngine("pld")
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(data, batch_size=8),
        noise_multiplier=2.0,
        max_grad_norm=1.0,
        dataset_size=38,
    )
    for x, y in loader:
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    found = engine.statement(1e-3, dataset="patients", tuning="none was done.")
    statement.check(found)
    assert found["status"] == "private"
    assert found["guarantee"]["epsilon"] == engine.get_epsilon(1e-3)
    assert found["run"] == {"dataset": "patients"}
    texts = {row["what"]: row["text"] for row in found["not_covered"]}
    assert texts["hyper-parameter tuning"].startswith("Declared: none was done.")
    assert texts["number of records"].startswith("38 was declared as the public size")


def test_other_runs_on_the_ledger_file_of_an_engine_are_told_apart(tmp_path: Path) -> None:
    found, epsilons = [], []
    for method in ("dp-sgd", "fo", "dp-sgd"):
        engine, model, optimizer, loader = small_runs.private(method, steps=4)
        engine.keep_ledger(tmp_path / "ledger.jsonl")
        small_runs.run(engine, model, optimizer, loader, steps=4)
        found.append(engine.statement(1e-5))
        epsilons.append(engine.get_epsilon(1e-5))
        engine.close()
    assert [one["guarantee"]["epsilon"] for one in found] == epsilons == sorted(epsilons)
    assert [one["ledger"]["charged"] for one in found] == [4, 4, 4]
    assert [sum(row["count"] for row in one["ledger"]["earlier"]) for one in found] == [0, 4, 8]
    alone = [one["guarantee"]["this_run_alone"] for one in found]
    assert alone[0] == alone[2] == epsilons[0] > alone[1]


def test_runs_for_two_relations_on_one_ledger_share_the_weaker_one(tmp_path: Path) -> None:
    for method in ("dp-ftrl", "dp-sgd"):
        engine, model, optimizer, loader = small_runs.private(method, steps=4)
        engine.keep_ledger(tmp_path / "ledger.jsonl")
        small_runs.run(engine, model, optimizer, loader, steps=4)
        found = engine.statement(1e-5)
        engine.close()
        assert "zero out one record" in found["guarantee"]["kind"]
        assert "add or remove" not in found["headline"]


# -- numbers --------------------------------------------------------------------------------


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("kind", list(EVENTS))
def test_the_curve_is_what_the_accountant_says(kind: str, accountant: str) -> None:
    events, claimed = EVENTS[kind], 2e-6
    curve = curves.epsilon_curve(events, claimed, accountant)
    deltas, epsilons = zip(*curve, strict=True)
    assert deltas == tuple(sorted({*curves.DELTAS, claimed}))
    assert (deltas[0], deltas[-1]) == (1e-10, 1e-2)
    assert all(a >= b for a, b in itertools.pairwise(epsilons))
    for delta in (claimed, 1e-10, 1e-2):
        assert dict(curve)[delta] == accounting.epsilon(events, delta, accountant)


def test_the_claim_is_in_the_curve_and_the_accountants_are_in_order() -> None:
    found = made(accountant="pld", delta=7e-6)
    claimed = [p["epsilon"] for p in found["curve"]["points"] if p["delta"] == 7e-6]
    assert claimed == [found["guarantee"]["epsilon"]]
    by = found["guarantee"]["by_accountant"]
    assert by["pld"] == found["guarantee"]["epsilon"]
    assert by["pld"] < by["rdp"] < by["rdp_classic"]
    for name, value in by.items():
        assert value == accounting.epsilon(EVENTS["sampled"], 7e-6, name)


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_the_claim_can_be_computed_again_from_the_file(accountant: str) -> None:
    """As docs/statement.md says."""
    text = json.dumps(made(EVENTS["mixed"], earlier=EVENTS["silent"], accountant=accountant))
    found = json.loads(text)
    ledger, claim = found["ledger"], found["guarantee"]
    events = [
        Event(e["sample_rate"], float(e["noise_multiplier"]), e["count"])
        for e in ledger["earlier"] + ledger["events"]
    ]
    assert accounting.epsilon(events, claim["delta"], claim["accountant"]) == claim["epsilon"]


def best_tests(event: Event) -> list[list[tuple[float, float]]]:
    """(false alarms, misses) of the best tests of one subsampled Gaussian, in both directions."""
    rate, sigma = event.sample_rate, event.noise_multiplier
    thresholds = np.linspace(-8 * sigma, 1 + 8 * sigma, 4000)
    absent = norm.cdf(thresholds / sigma)
    present = (1 - rate) * absent + rate * norm.cdf((thresholds - 1) / sigma)
    added = list(zip(1 - absent, present, strict=True))
    return [added, [(misses, alarms) for alarms, misses in added]]


@pytest.mark.parametrize("accountant", ["pld", "rdp"])
@pytest.mark.parametrize(
    "event", [Event(1.0, 1.0), Event(1.0, 0.25), Event(0.3, 0.7)], ids=["mu1", "mu4", "sampled"]
)
def test_no_test_makes_fewer_errors_than_the_trade_off_curve(event: Event, accountant: str) -> None:
    curve = curves.epsilon_curve([event], 1e-5, accountant)
    bounds = curves.trade_off([event], accountant, curve)
    assert len(bounds) == len(curves.FALSE_ALARMS)
    for tests in best_tests(event):
        alarms, misses = zip(*sorted(tests), strict=True)
        for alpha, bound in bounds:
            best = float(np.interp(alpha, alarms, misses))
            assert 0 <= bound <= best + 1e-5, (alpha, bound, best)
            if accountant == "pld" and event.sample_rate == 1:
                assert bound >= best - 5e-3, (alpha, bound, best)


def test_a_trade_off_curve_of_more_noise_is_nowhere_lower() -> None:
    less, more = (
        dict(curves.trade_off(e, "rdp", curves.epsilon_curve(e, 1e-5, "rdp")))
        for e in ([Event(0.1, 0.8, 50)], [Event(0.1, 1.6, 50)])
    )
    assert all(more[alpha] >= less[alpha] for alpha in less)
    assert more[0.05] > less[0.05]


@pytest.mark.parametrize("mu", [0.05, 0.5, 2.0, 6.0])
def test_mu_of_one_gaussian_is_its_own(mu: float) -> None:
    curve = curves.epsilon_curve([Event(1.0, 1 / mu)], 1e-5, "pld")
    for delta, epsilon in curve:
        if epsilon > 0:
            found = curves.gaussian_mu(delta, epsilon)
            assert found == pytest.approx(mu, rel=2e-3)
            assert found > mu * (1 - 1e-6)
            assert curves.gaussian_delta(found, epsilon) == pytest.approx(delta, rel=1e-6)


def test_mu_is_marked_as_approximate() -> None:
    found = made()["gaussian_dp"]
    assert found["approximate"] is True
    assert found["over_curve"]["smallest"] <= found["mu"] <= found["over_curve"]["largest"]
    assert "## Gaussian DP equivalent (approximate)" in statement.markdown(made())


def test_several_records_cost_at_least_what_they_do_in_one_gaussian() -> None:
    """With one release and no sampling, k records are a shift of k: the exact cost is known."""
    event = Event(1.0, 8.0)
    bounds = curves.of_several_records([event], 1e-5)
    assert tuple(bounds) == curves.GROUP_SIZES
    for records, bound in bounds.items():
        exact = accounting.epsilon([Event(1.0, 8.0 / records)], 1e-5, "pld")
        assert exact < bound < math.inf
        assert bound >= records * accounting.epsilon([event], 1e-5, "rdp")


def test_many_different_events_are_rounded_as_the_accountant_does() -> None:
    events = [Event(1.0, 4 + step / 50, 1) for step in range(70)]
    assert len(curves.prepared(events)) <= 64
    for accountant in ("rdp", "rdp_classic"):
        assert curves.epsilons(events, [1e-5], accountant) == [
            accounting.epsilon(events, 1e-5, accountant)
        ]
    with_none = [*events, Event(1.0, 0.0)]
    assert curves.epsilons(with_none, [1e-5], "pld") == [math.inf]


def test_epsilon_is_rounded_up_and_misses_are_rounded_down() -> None:
    found = made(delta=1e-7)
    found["guarantee"]["epsilon"] = 1.0001
    found["trade_off"]["points"][0]["misses_at_least"] = 0.99999
    page = statement.markdown(found)
    assert "| epsilon | 1.001 |" in page
    assert "| 0.0001 | 0.9999 |" in page


def test_other_runs_of_the_ledger_compose_with_this_one() -> None:
    own, others = [Event(0.05, 1.1, 200)], [Event(0.05, 1.1, 300), Event(0.2, 3.0, 10)]
    found = made(own, earlier=others, accountant="pld")
    whole = found["guarantee"]["epsilon"]
    assert whole == accounting.epsilon([*others, *own], 1e-5, "pld")
    alone = accounting.epsilon(own, 1e-5, "pld")
    assert found["guarantee"]["this_run_alone"] == alone < whole
    assert "together with what its ledger held before" in found["headline"]
    assert len(found["ledger"]["earlier"]) == 2
    page = statement.markdown(found)
    assert "epsilon of this run alone" in page and "| 0.2 | 3 | 10 |" in page


def test_an_earlier_run_without_guarantee_takes_it_from_all() -> None:
    found = made(earlier=[Event(0.1, 0.0, 1)])
    assert found["status"] == "none"
    assert "an earlier release in the same ledger" in found["headline"]
    assert found["guarantee"]["this_run_alone"] is not None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"noise_multiplier": 0.0, "noise_stds": (0.0,)}, "made without noise"),
        ({"clipping": "quantile, flat", "count_noise": 0.0}, "counts of quantile clipping"),
    ],
)
def test_without_noise_there_is_no_guarantee(changes: dict[str, Any], words: str) -> None:
    found = made([Event(0.05, 0.0, 5)], plan=plan_of(**changes))
    statement.check(found)
    assert words in found["headline"]
    assert found["guarantee"]["kind"] == "none"


def test_nothing_released_is_said() -> None:
    found = made([], released=0)
    statement.check(found)
    assert found["guarantee"]["epsilon"] == 0
    assert found["gaussian_dp"]["mu"] is None
    assert any("Nothing was released" in warning for warning in found["warnings"])


# -- groups ---------------------------------------------------------------------------------


def grouped(**changes: Any) -> PrivacyPlan:
    three = {"clipping": "per_layer", "group_names": ("a", "b", "c"), "bounds": (0.5, 1.0, 2.0)}
    return plan_of(**three | changes)


def test_the_marginal_figure_is_that_of_the_budget_command_and_marked() -> None:
    sigma, beta = 2.0, 0.8
    joint = accounting.joint_multiplier([sigma] * 3)
    plan = grouped(noise_multiplier=joint, noise_stds=(1.0, 2.0, 4.0), beta=beta)
    found = made([Event(0.05, joint / beta, 200)], plan=plan)
    report = accounting.budget(
        sample_rate=0.05, steps=200, delta=1e-5, beta=beta, group_noise_multiplier=sigma, groups=3
    )
    assert found["marginal"]["note"] == "diagnostic, not a guarantee"
    for row in found["marginal"]["groups"]:
        assert row["sigma_eff"]["smallest"] == pytest.approx(sigma / beta)
        assert row["epsilon"] == pytest.approx(report["marginal_epsilon"]["rdp_classic"])
    assert found["guarantee"]["epsilon"] == report["epsilon"]["rdp"]
    page = statement.markdown(found)
    assert "## One group alone (diagnostic, not a guarantee)" in page
    statement.check(found)


def test_shared_noise_over_unequal_bounds_shows_every_groups_own_figure() -> None:
    std = 1.1 * math.sqrt(5.25)
    found = made(plan=grouped(noise_stds=(std, std, std)))
    figures = [row["epsilon"] for row in found["marginal"]["groups"]]
    assert figures == sorted(figures) and figures[0] < figures[-1]
    assert figures[-1] < found["guarantee"]["by_accountant"]["rdp_classic"]


def test_one_group_and_schedules_have_no_marginal_figure() -> None:
    assert made()["marginal"] is None
    stds = tuple((s, s, s) for s in (2.0, 1.0))
    schedule = grouped(noise_multiplier=(2.0, 1.0), noise_stds=stds)
    assert made([Event(0.05, 2.0), Event(0.05, 1.0)], plan=schedule)["marginal"] is None
    assert "One group alone" not in statement.markdown(made())


# -- words ----------------------------------------------------------------------------------


def test_the_unit_follows_the_adjacency() -> None:
    zeroed = "zero out one record (fixed order, public number of records)"
    found = made(plan=plan_of(adjacency=zeroed))
    assert zeroed in found["headline"] and zeroed in found["guarantee"]["kind"]
    assert "not how many records there are" in found["unit"]["compared"]
    assert "added or from which one was removed" in made()["unit"]["compared"]


def test_what_is_not_covered_names_every_topic() -> None:
    facts = {
        "seed": 5,
        "classes": 3,
        "classes_inferred": True,
        "outside_guarantee": ["train_loss_outside_guarantee"],
    }
    found = made(run=facts)
    texts = {row["what"]: row["text"] for row in found["not_covered"]}
    for topic in (
        "hyper-parameter tuning",
        "preprocessing",
        "logged training figures",
        "seeds",
        "number of records",
        "number of classes",
        "held-out data",
        "side channels",
        "floating point",
        "several records of one person",
        "other uses of the data",
    ):
        assert topic in texts
    assert "3 was read off the labels" in texts["number of classes"]
    assert "train_loss_outside_guarantee" in texts["logged training figures"]
    assert "1000 was read off the data" in texts["number of records"]
    assert any("Remove them before sharing" in warning for warning in found["warnings"])


def test_the_calibration_says_how_the_noise_was_found() -> None:
    given = made()["calibration"]
    assert given["how"].startswith("The noise multiplier was given")
    facts = {"target_epsilon": 3.0, "max_epsilon": 2.5, "planned_epsilon": 2.99}
    solved = made(run=facts)["calibration"]
    assert "at most 3 at delta 1e-05" in solved["how"] and "200 planned" in solved["how"]
    assert "exceed 2.5" in solved["how"]
    assert solved["sigma_eff"] == {"smallest": 1.1, "largest": 1.1}


def test_a_run_that_was_stopped_says_when_its_epsilon_holds() -> None:
    """Without a word on how it ended, the claim keeps the planned number of releases."""
    found = made([Event(0.05, 1.1, 20)], released=20)
    assert found["guarantee"]["epsilon"] == made()["guarantee"]["epsilon"]
    assert found["guarantee"]["end"]["kind"] == "planned releases"
    assert any("20 of 200 planned releases were made" in w for w in found["warnings"])
    unmade = {"sample_rate": 0.05, "noise_multiplier": 1.1, "count": 180}
    assert found["ledger"]["unmade"] == [unmade]
    assert "Planned and not made" in statement.markdown(found)
    guarded = made([Event(0.05, 1.1, 20)], released=20, run={"stopped_by": "budget guard"})
    assert guarded["guarantee"]["epsilon"] < found["guarantee"]["epsilon"]
    assert guarded["guarantee"]["end"]["kind"] == "budget guard"
    several = made([Event(0.05, 3.0, 10), Event(0.1, 1.1, 10)], released=20)
    unmade = {"sample_rate": 0.1, "noise_multiplier": 1.1, "count": 180}
    assert several["ledger"]["unmade"] == [unmade]  # the costliest of both
    assert made()["guarantee"]["end"]["kind"] == "as planned"
    assert made()["ledger"]["unmade"] == []
    assert made(released=201)["guarantee"]["end"]["kind"] == "open"
    assert made(plan=plan_of(steps=None))["guarantee"]["end"]["kind"] == "open"


def test_choosing_by_private_records_is_not_called_post_processing() -> None:
    found = made()
    said = found["mechanism"]["text"]
    assert "post-processing" in said and "as long as it looks at no private record" in said
    assert "choice" not in said
    texts = {row["what"]: row["text"] for row in found["not_covered"]}
    assert "by figures on private records" in texts["choice of a checkpoint"]


def test_weak_epsilons_and_large_deltas_are_warned_of() -> None:
    assert any("protects little" in w for w in made(EVENTS["loud"])["warnings"])
    assert any("allow a whole record" in w for w in made(delta=2e-3)["warnings"])
    assert made()["warnings"] == []


def test_lost_releases_are_said_to_be_counted() -> None:
    found = made(over_reported=7, released=193)
    assert "7 of the charged releases were lost in a crash" in statement.markdown(found)


def test_every_event_is_in_the_json_and_a_long_ledger_is_cut_on_the_page() -> None:
    events = [Event(0.05, 5.0 + step % 2, 2) for step in range(45)]
    found = made(events)
    assert len(found["ledger"]["events"]) == 45
    assert found["ledger"]["charged"] == 90
    assert "and 5 more rows, all in statement.json" in statement.markdown(found)


def test_secrets_paths_and_objects_do_not_get_in() -> None:
    for secret in ("noise_seed", "key", "generator_state"):
        with pytest.raises(PrivacyError, match=secret):
            made(run={secret: 123456})
    facts = {"dataset": "/home/someone/patients.npz", "other": object(), "sizes": np.arange(3)}
    found = made(run=facts)
    assert found["run"] == {"dataset": "patients.npz", "other": "<object>", "sizes": [0, 1, 2]}


def test_a_statement_from_elsewhere_cannot_move_the_cursor_or_break_a_table() -> None:
    found = made(caveats=["a\x1b[2Jb\u202ec\nd"], run={"model": "x | y\x07"})
    page = statement.markdown(found)
    assert "a[2Jbc d" in page and "x \\| y" in page
    assert not any(mark in page for mark in "\x1b\x07\u202e")


# -- the schema -----------------------------------------------------------------------------


def whole() -> dict[str, Any]:
    """A statement with every part filled."""
    sigma = accounting.joint_multiplier([2.0] * 3)
    return made(
        [Event(0.05, sigma, 200), Event(0.05, math.inf, 2)],
        plan=grouped(noise_multiplier=sigma, noise_stds=(1.0, 2.0, 4.0), count_noise=None),
        earlier=[Event(0.1, 2.0, 3)],
        caveats=["a caveat"],
        run={"dataset": "d", "model": "m", "seed": 1, "classes": 2, "target_epsilon": 9.0},
    )


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value; of a list its first entry stands for the others."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def damaged(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The statement with one place changed, removed or added to, in many ways."""
    wrong = (None, True, -1, 1.5, "", "text", [1], {"a": 1})
    for path in list(places(value)):
        for change in (*wrong, "remove", "add"):
            broken = copy.deepcopy(value)
            *parents, last = path
            at: Any = broken
            for step in parents:
                at = at[step]
            if change == "remove":
                del at[last]
            elif change == "add":
                if not isinstance(at[last], dict):
                    continue
                at[last]["unknown"] = 1
            else:
                at[last] = change
            yield f"{path} {change!r}", broken


def refused(value: Any) -> bool:
    try:
        statement.schema._compare(value, statement.json_schema(), "")  # type: ignore[attr-defined]
    except ConfigError:
        return True
    return False


def test_our_checker_and_the_jsonschema_package_agree() -> None:
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(statement.json_schema())
    validator = jsonschema.Draft202012Validator(statement.json_schema())
    good = whole()
    validator.validate(good)
    statement.check(good)
    counts = {True: 0, False: 0}
    for what, value in damaged(good):
        theirs = not validator.is_valid(value)
        assert refused(value) == theirs, what
        counts[theirs] += 1
    assert counts[True] > 500 and counts[False] > 50


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("guarantee", "epsilon"), math.nan, "guarantee.epsilon is nan"),
        (("guarantee", "epsilon"), None, "contradicts"),
        (("status",), "none", "contradicts"),
        (("guarantee", "delta"), 1.0, "guarantee.delta is 1.0: it is too large"),
        (("ledger", "events", 0, "count"), 0, r"ledger.events\[0\].count is 0: it is too small"),
        (("gaussian_dp", "approximate"), False, "it must be True"),
        (("marginal", "note"), "a guarantee", "diagnostic, not a guarantee"),
        (("version",), 2, "version is 2"),
        (("version",), True, "version is True"),
        (("versions", "torch"), "", "must not be empty"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path: Any, value: Any, words: str) -> None:
    found = whole()
    *parents, last = path
    at: Any = found
    for step in parents:
        at = at[step]
    at[last] = value
    with pytest.raises(ConfigError, match=words):
        statement.check(found)


@pytest.mark.parametrize("value", [None, [], "text", 3, {}], ids=repr)
def test_what_is_no_statement_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        statement.check(value)


def test_the_checker_passes_over_no_keyword() -> None:
    with pytest.raises(NotImplementedError, match="oneOf"):
        statement.schema._compare(1, {"oneOf": []}, "")  # type: ignore[attr-defined]


def test_the_schema_ships_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["vestige"]
    assert any(fnmatch.fnmatch("schemas/statement.schema.json", p) for p in patterns)


# -- the command ----------------------------------------------------------------------------


def call(*arguments: str) -> Result:
    app = typer.Typer(cls=_Program, add_completion=False, pretty_exceptions_enable=False)
    app.callback()(lambda: None)  # a program with subcommands, like the real one
    cli_statement.register(app)
    line = ["statement", *arguments]
    return CliRunner().invoke(app, line, catch_exceptions=False, prog_name="vestige")


def folder_with(path: Path, content: bytes | None = None) -> Path:
    path.mkdir()
    (path / "config.json").write_text("{}")
    if content is not None:
        (path / "statement.json").write_bytes(content)
    return path


def test_the_command_prints_the_page_or_the_json(tmp_path: Path) -> None:
    found = whole()
    run = folder_with(tmp_path / "run", json.dumps(found).encode())
    page = call(str(run))
    assert (page.exit_code, page.stdout) == (0, statement.markdown(found))
    printed = call(str(run), "--json")
    assert json.loads(printed.stdout) == found
    written = call(str(run), "--out", str(tmp_path / "signed.md"))
    assert (written.exit_code, written.stdout) == (0, "")
    assert (tmp_path / "signed.md").read_text() == statement.markdown(found)
    call(str(run), "--json", "--out", str(tmp_path / "copy.json"))
    assert json.loads((tmp_path / "copy.json").read_text()) == found


def one_line(result: Result) -> str:
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.startswith("vestige: error: ") and result.stderr.count("\n") == 1
    return result.stderr


def test_a_folder_without_a_statement_is_told_in_one_line(tmp_path: Path) -> None:
    assert "is no folder" in one_line(call(str(tmp_path / "nowhere")))
    (tmp_path / "empty").mkdir()
    assert "no other file of a run" in one_line(call(str(tmp_path / "empty")))
    killed = one_line(call(str(folder_with(tmp_path / "killed"))))
    assert "has no statement.json" in killed and "config.json" in killed


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff\xfe\x00",
        b"{",
        b"[]",
        b"null",
        b'{"guarantee": NaN}',
        b"[" * 100_000,
        b'{"statement": "vestige privacy statement"}',
    ],
    ids=["empty", "bytes", "cut", "list", "null", "nan", "deep", "short"],
)
def test_a_damaged_statement_is_told_in_one_line(tmp_path: Path, content: bytes) -> None:
    told = one_line(call(str(folder_with(tmp_path / "run", content))))
    assert "is damaged" in told and len(told) < 400


def test_mutated_statements_are_printed_or_refused_and_never_raise(tmp_path: Path) -> None:
    """Single bytes of a real file changed at random: a page, or one line, and nothing else."""
    good = json.dumps(whole()).encode()
    generator = np.random.default_rng(0)
    run = folder_with(tmp_path / "run")
    codes = set()
    for _ in range(150):
        broken = bytearray(good)
        for place in generator.integers(0, len(good), 1 + generator.integers(0, 3)):
            broken[place] = generator.integers(0, 256)
        (run / "statement.json").write_bytes(bytes(broken))
        result = call(str(run))
        if result.exit_code:
            one_line(result)
        codes.add(result.exit_code)
    assert codes == {0, 2}


def test_reading_and_printing_need_no_torch(tmp_path: Path) -> None:
    run = folder_with(tmp_path / "run", json.dumps(whole()).encode())
    code = (
        "import sys, pathlib, vestige.cli.statement\n"
        "from vestige import statement\n"
        f"print(len(statement.markdown(statement.read(pathlib.Path({str(run)!r})))))\n"
        "assert 'torch' not in sys.modules and 'dp_accounting' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
