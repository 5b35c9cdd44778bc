"""The sentences of a statement say what is true, and its page shows no more than the JSON."""

from __future__ import annotations

import fnmatch
import tomllib
from pathlib import Path

import pytest

from tests.support import small_runs
from tests.support.statements import EVENTS, made, plan_of
from vestige import statement
from vestige.privacy import accounting
from vestige.privacy.ledger import Event


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


def test_epsilon_is_rounded_up_and_misses_are_rounded_down() -> None:
    found = made(delta=1e-7)
    found["guarantee"]["epsilon"] = 1.0001
    found["trade_off"]["points"][0]["misses_at_least"] = 0.99999
    page = statement.markdown(found)
    assert "| epsilon | 1.001 |" in page
    assert "| 0.0001 | 0.9999 |" in page


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


def test_a_statement_from_elsewhere_cannot_move_the_cursor_or_break_a_table() -> None:
    found = made(caveats=["a\x1b[2Jb\u202ec\nd"], run={"model": "x | y\x07"})
    page = statement.markdown(found)
    assert "a[2Jbc d" in page and "x \\| y" in page
    assert not any(mark in page for mark in "\x1b\x07\u202e")


def test_mu_is_marked_as_approximate() -> None:
    found = made()["gaussian_dp"]
    assert found["approximate"] is True
    assert found["over_curve"]["smallest"] <= found["mu"] <= found["over_curve"]["largest"]
    assert "## Gaussian DP equivalent (approximate)" in statement.markdown(made())


def test_the_templates_ship_with_the_package() -> None:
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    patterns = project["tool"]["setuptools"]["package-data"]["vestige"]
    for name in ("statement/statement.md.j2", "statement/words.j2"):
        assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns)
