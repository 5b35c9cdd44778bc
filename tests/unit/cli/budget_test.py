"""`vestige budget`: the figures, the table, and one line for each bad input."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import pytest

from tests.support.program import check_refused, plain, run, run_json
from vestige.cli.budget import costs
from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.ledger import Event

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_budget_json_with_a_joint_multiplier() -> None:
    arguments = "budget --sample-rate 0.1 --noise-multiplier 1.1 --steps 20 --delta 1e-4 --beta 0.9"
    report = run_json(arguments)
    assert report["sigma_eff"] == pytest.approx(1.1 / 0.9)
    assert report["noise_multiplier"] == 1.1
    assert report["group_noise_multiplier"] is None
    assert report["marginal_epsilon"] is None
    event = Event(0.1, 1.1 / 0.9, 20)
    assert report["epsilon"] == {
        name: accounting.epsilon([event], 1e-4, name) for name in ("pld", "rdp", "rdp_classic")
    }


def test_budget_json_in_the_papers_form() -> None:
    arguments = (
        "budget --sample-rate 0.1 --group-noise-multiplier 2 --groups 4 --steps 20 --beta 0.8"
    )
    report = run_json(arguments)
    assert report["sigma_eff"] == pytest.approx(2 / (0.8 * 2))
    assert report["noise_multiplier"] == 1.0
    assert report["group_noise_multiplier"] == 2.0
    assert report["delta"] == 1e-5
    marginal = accounting.epsilon([Event(0.1, 2 / 0.8, 20)], 1e-5, "pld")
    assert report["marginal_epsilon"]["pld"] == marginal
    assert report["marginal_epsilon"]["pld"] < report["epsilon"]["pld"]
    text = plain(run(arguments).stdout)
    assert "diagnostic, not a guarantee" in text


def test_budget_without_noise_is_null_and_infinite() -> None:
    arguments = "budget --sample-rate 0.1 --noise-multiplier 0 --steps 20"
    report = run_json(arguments)
    assert report["epsilon"] == {"pld": None, "rdp": None, "rdp_classic": None}
    assert report["guarantee"] == "none"
    assert plain(run(arguments).stdout).count("no guarantee") == 3


def test_budget_reads_as_a_table_whose_figures_are_rounded_up() -> None:
    arguments = "budget --sample-rate 0.1 --noise-multiplier 1 --steps 20"
    text = plain(run(arguments).stdout)
    for name, value in run_json(arguments)["epsilon"].items():
        shown = float(re.findall(rf"\b{name} ([\d.]+)", text)[0])
        assert value <= shown < value + 1e-4
    assert "diagnostic" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("budget", "Missing option '--sample-rate'"),
        ("budget --sample-rate .1 --steps 5", "give exactly one"),
        (
            "budget --sample-rate .1 --steps 5 --noise-multiplier 1 --group-noise-multiplier 1",
            "give exactly one",
        ),
        (
            "budget --sample-rate .1 --steps 5 --noise-multiplier 1 --groups 3",
            "groups 3 needs group_noise_multiplier",
        ),
        ("budget --sample-rate 0 --steps 5 --noise-multiplier 1", "sample_rate 0.0 is not in"),
        ("budget --sample-rate 2 --steps 5 --noise-multiplier 1", "sample_rate 2.0 is not in"),
        ("budget --sample-rate .1 --steps 0 --noise-multiplier 1", "steps=0 must be"),
        ("budget --sample-rate .1 --steps 1.5 --noise-multiplier 1", "'--steps'"),
        ("budget --sample-rate .1 --steps 5 --noise-multiplier -1", "noise_multiplier -1.0"),
        ("budget --sample-rate .1 --steps 5 --noise-multiplier 1 --delta 1", "delta 1.0"),
        ("budget --sample-rate .1 --steps 5 --noise-multiplier 1 --beta 0", "beta 0.0"),
        ("budget --sample-rate .1 --steps 5 --group-noise-multiplier 1 --groups 0", "groups 0"),
    ],
)
def test_other_bad_input_gets_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    check_refused(run(arguments), message)
    assert not list(tmp_path.iterdir())


def test_budget_of_a_joint_multiplier() -> None:
    report = costs(0.04, 6250, 1e-5, noise_multiplier=1.1, beta=0.9)
    assert report["epsilon"] == pytest.approx(
        {"pld": 17.44, "rdp": 18.74, "rdp_classic": 19.90}, abs=0.006
    )
    del report["epsilon"]
    assert report == {
        "sigma_eff": 1.1 / 0.9,
        "noise_multiplier": 1.1,
        "group_noise_multiplier": None,
        "groups": 1,
        "beta": 0.9,
        "sample_rate": 0.04,
        "steps": 6250,
        "delta": 1e-5,
        "guarantee": "(epsilon, delta)-DP, add or remove one record",
        "marginal_epsilon": None,
    }


def test_budget_of_groups_prints_the_marginal_as_a_diagnostic() -> None:
    report = costs(0.04, 1250, 1e-5, beta=0.95, group_noise_multiplier=1.1, groups=3)
    assert report["noise_multiplier"] == pytest.approx(1.1 / math.sqrt(3))
    assert report["sigma_eff"] == pytest.approx(1.1 / 0.95 / math.sqrt(3))
    assert report["group_noise_multiplier"] == 1.1
    assert report["groups"] == 3
    assert report["epsilon"]["pld"] == pytest.approx(24.1, abs=0.05)
    assert report["marginal_epsilon"]["pld"] == pytest.approx(
        accounting.epsilon([Event(0.04, 1.1 / 0.95, 1250)], 1e-5)
    )
    assert set(report["marginal_epsilon"]) == set(accounting.ACCOUNTANTS)
    assert report["marginal_note"] == "diagnostic, not a guarantee"


def test_one_group_has_no_marginal() -> None:
    report = costs(0.1, 10, 1e-5, group_noise_multiplier=2.0)
    assert report["marginal_epsilon"] is None
    assert "marginal_note" not in report
    assert report["epsilon"] == costs(0.1, 10, 1e-5, noise_multiplier=2.0)["epsilon"]


def test_budget_without_noise_is_null_and_no_guarantee() -> None:
    report = costs(0.1, 10, 1e-5, noise_multiplier=0.0)
    assert report["epsilon"] == {"pld": None, "rdp": None, "rdp_classic": None}
    assert report["guarantee"] == "none"
    json.dumps(report, allow_nan=False)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({}, "neither"),
        ({"noise_multiplier": 1.0, "group_noise_multiplier": 1.0}, "both"),
        ({"noise_multiplier": 1.0, "groups": 2}, "group_noise_multiplier"),
        ({"noise_multiplier": -1.0}, "noise_multiplier -1.0"),
        ({"noise_multiplier": math.inf}, "noise_multiplier inf"),
        ({"group_noise_multiplier": math.nan}, "group_noise_multiplier nan"),
        ({"group_noise_multiplier": 1.0, "groups": 0}, "groups 0"),
        ({"group_noise_multiplier": 1.0, "groups": 2.0}, "groups 2.0"),
        ({"noise_multiplier": 1.0, "beta": 0.0}, "beta"),
        ({"noise_multiplier": 1.0, "delta": 1.0}, "delta"),
        ({"noise_multiplier": 1.0, "steps": 0}, "count 0"),
        ({"noise_multiplier": 1.0, "sample_rate": 1.2}, "sample_rate"),
    ],
)
def test_bad_budget_arguments_are_refused(changed: dict[str, object], message: str) -> None:
    good: dict[str, object] = {"sample_rate": 0.1, "steps": 10, "delta": 1e-5}
    with pytest.raises(ConfigError, match=message):
        costs(**(good | changed))  # type: ignore[arg-type]
