"""From facts to a statement: its numbers are those of the accountants, of every method."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from tests.support import small_runs
from tests.support.statements import EVENTS, grouped, made, plan_of
from vestige import PrivacyEngine, statement
from vestige.cli.budget import costs
from vestige.errors import ConfigError, PrivacyError
from vestige.methods import METHODS
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.privacy.noise_scales import joint_multiplier

SAMPLERS = {
    "Poisson": "poisson",
    "CyclicPoisson": "cyclic poisson",
    "FixedOrder": "fixed order",
    "Importance": "importance",
}


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
    in_turn = name == "banded-inverse"  # cyclic lots, from which no amplification is claimed
    assert found["sampler"]["kind"] == ("groups in turn" if in_turn else SAMPLERS[drawing])
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
    found = engine.statement(1e-3, dataset="patients", tuning="none was done")
    statement.check(found)
    assert found["status"] == "private"
    assert found["guarantee"]["epsilon"] == engine.get_epsilon(1e-3)
    assert found["run"] == {"dataset": "patients"}
    texts = {row["what"]: row["text"] for row in found["not_covered"]}
    assert texts["hyper-parameter tuning"].startswith("Declared: none was done. Choosing settings")
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


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_nothing_released_is_said(accountant: str) -> None:
    found = made([], released=0, accountant=accountant)
    statement.check(found)
    assert found["guarantee"]["epsilon"] == 0
    assert {group["epsilon"] for group in found["unit"]["groups"]} == {0.0}
    assert found["gaussian_dp"]["mu"] is None
    assert any("Nothing was released" in warning for warning in found["warnings"])


def test_the_marginal_figure_is_that_of_the_budget_command_and_marked() -> None:
    sigma, beta = 2.0, 0.8
    joint = joint_multiplier([sigma] * 3)
    plan = grouped(noise_multiplier=joint, noise_stds=(1.0, 2.0, 4.0), beta=beta)
    found = made([Event(0.05, joint / beta, 200)], plan=plan)
    report = costs(
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


def test_secrets_paths_and_objects_do_not_get_in() -> None:
    for secret in ("noise_seed", "key", "generator_state"):
        with pytest.raises(PrivacyError, match=secret):
            made(run={secret: 123456})
    facts = {"dataset": "/home/someone/patients.npz", "other": object(), "sizes": np.arange(3)}
    found = made(run=facts)
    assert found["run"] == {"dataset": "patients.npz", "other": "<object>", "sizes": [0, 1, 2]}


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"seed": "five"}, "fact seed is 'five': it should be a valid integer. Give it"),
        ({"target_epsilon": -1.0}, "fact target_epsilon is -1.0: it should be greater"),
        ({"outside_guarantee": "loss"}, "fact outside_guarantee is 'loss': it should be"),
    ],
)
def test_a_fact_of_another_type_is_refused_by_name(facts: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        made(run=facts)


def test_a_file_whose_name_is_no_text_has_a_statement() -> None:
    facts = made(run={"dataset": "patients-\udcff.npz", "note": "\udcfe"})["run"]
    assert facts == {"dataset": "patients-?.npz", "note": "?"}


def test_the_parameters_of_build_are_the_fields_of_a_claim() -> None:
    with pytest.raises(TypeError, match="relesed"):
        made(relesed=3)


def test_a_misspelt_fact_is_told_its_nearest() -> None:
    engine, *_ = small_runs.private("dp-sgd", steps=1)
    with pytest.raises(ConfigError, match=r"fact tunning is not one .* did you mean tuning\?"):
        engine.statement(1e-3, tunning="none was done.")
    assert engine.statement(1e-3, hospital="a")["run"]["hospital"] == "a"


def test_a_statement_about_users_says_so_wherever_a_record_stood() -> None:
    engine, *rest = small_runs.private(
        "dp-sgd", steps=4, units=torch.arange(24) // 2, rows_per_unit=2, views=3, augment=abs
    )
    small_runs.run(engine, *rest, steps=4)
    found = engine.statement(1e-5)
    assert found["unit"]["record"].startswith("one user with all rows")
    assert found["unit"]["adjacency"] == "add or remove one user with all rows"
    assert "one user with all rows" in found["headline"]
    assert "mean loss of the 3 augmented views of every user's rows" in found["mechanism"]["text"]
    assert "at most 2 rows" in found["sampler"]["text"]
    assert {"number of users", "who is a user"} < {row["what"] for row in found["not_covered"]}
    page = statement.markdown(found)
    assert "| users | 12 (read off the data, public) |" in page
    assert "users together" in page
    assert "a given user was used" in page


def test_a_statement_about_views_is_about_records() -> None:
    found = made(plan=plan_of(views=3))
    assert found["unit"]["record"].startswith("one record")
    assert "the mean loss of the 3 augmented views of every record is" in found["mechanism"]["text"]


PLAIN = "the composition of mixtures of Gaussians"
GENERAL = "They follow the general rule along the Rényi curve"


@pytest.mark.parametrize("beta", [1.0, 0.5])
def test_several_records_of_plain_releases_have_the_tighter_figure(beta: float) -> None:
    charged = [Event(0.05, 1.1 / beta, 200)]
    found = made(charged, plan=plan_of(beta=beta), accountant="pld")["unit"]
    assert PLAIN in found["several_records"]
    expected = statement.curves.of_several_records(charged, 1e-5, plain=True)
    assert {group["records"]: group["epsilon"] for group in found["groups"]} == expected


@pytest.mark.parametrize(
    "changes",
    [
        {"accountant": "rdp"},
        {"plan": plan_of(method="dp-is")},
        {"plan": plan_of(method="dp-ftrl")},
        {"plan": plan_of(method="fractional-noise", settings={"bands": 3})},
        {"plan": plan_of(method="dp-sam")},
        {"plan": plan_of(method="geodp")},
        {"plan": plan_of(method="somebody's own")},
        {"plan": plan_of(count_noise=2.0)},
        {"plan": plan_of(noise_multiplier=1.2)},  # charged for more than the sum
        {"earlier": [Event(0.1, 3.0, 5)]},
    ],
)
def test_several_records_of_anything_else_keep_the_general_rule(changes: dict[str, Any]) -> None:
    charged = [Event(0.05, 1.1, 200)]
    found = made(charged, **{"accountant": "pld"} | changes)["unit"]
    assert GENERAL in found["several_records"]
    everything = [*charged, *changes.get("earlier", ())]
    expected = statement.curves.of_several_records(everything, 1e-5)
    got = {group["records"]: group["epsilon"] for group in found["groups"]}
    assert got == {k: v if math.isfinite(v) else None for k, v in expected.items()}
