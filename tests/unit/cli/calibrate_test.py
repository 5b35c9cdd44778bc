"""`vestige calibrate`: the figures, the words, and one line for each bad input."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.program import check_refused, plain, run, run_json
from vestige.cli.budget import costs
from vestige.cli.calibrate import solved
from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.ledger import Event

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_calibrate_json() -> None:
    arguments = (
        "calibrate --epsilon 2 --delta 1e-4 --sample-rate 0.1 --steps 20 --beta 0.9 --groups 4"
    )
    report = run_json(arguments, "--accountant", "rdp")
    assert report["group_noise_multiplier"] == pytest.approx(2 * report["noise_multiplier"])
    assert 1.98 < report["epsilon"] <= report["target_epsilon"] == 2.0
    event = Event(0.1, report["noise_multiplier"] / 0.9, 20)
    assert report["epsilon"] == accounting.epsilon([event], 1e-4, "rdp")
    assert (report["accountant"], report["beta"], report["steps"]) == ("rdp", 0.9, 20)


def test_calibrate_in_words_and_its_noise_given_to_budget() -> None:
    arguments = "calibrate --epsilon 2 --sample-rate 0.1 --steps 20"
    report = run_json(arguments)
    assert report["accountant"] == "pld"
    text = plain(run(arguments).stdout)
    shown = float(re.findall(r"noise multiplier ([\d.]+)", text)[0])
    assert report["noise_multiplier"] <= shown < report["noise_multiplier"] + 1e-6
    assert "in each group" not in text
    assert "in each group" in plain(run(arguments, "--groups", "2").stdout)
    noise = repr(report["noise_multiplier"])
    back = run_json(f"budget --noise-multiplier {noise} --sample-rate 0.1 --steps 20")
    assert back["epsilon"]["pld"] == report["epsilon"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("calibrate --sample-rate .1 --steps 5", "Missing option '--epsilon'"),
        ("calibrate --epsilon 0 --sample-rate .1 --steps 5", "epsilon 0.0"),
        ("calibrate --epsilon 1 --sample-rate .1 --steps -5", "steps=-5 must be"),
        ("calibrate --epsilon 1 --sample-rate .1 --steps 5 --delta 0", "delta 0.0"),
        ("calibrate --epsilon 1 --sample-rate .1 --steps 5 --beta 2", "beta 2.0"),
        ("calibrate --epsilon 1 --sample-rate .1 --steps 5 --groups 0", "groups 0"),
        ("calibrate --epsilon 1 --sample-rate 7 --steps 5", "sample_rate 7.0"),
        ("calibrate --epsilon 1 --sample-rate .1 --steps 5 --accountant x", "accountant 'x'"),
    ],
)
def test_other_bad_input_gets_one_line(arguments: str, message: str, tmp_path: Path) -> None:
    check_refused(run(arguments), message)
    assert not list(tmp_path.iterdir())


def test_calibration_report() -> None:
    report = solved(2.0, 1e-5, 0.05, 100, beta=0.8, groups=4, accountant="rdp")
    found = accounting.calibrate(2.0, 1e-5, 0.05, 100, "rdp", 0.8)
    assert report == {
        "noise_multiplier": found.noise_multiplier,
        "group_noise_multiplier": found.noise_multiplier * 2,
        "sigma_eff": found.noise_multiplier / 0.8,
        "epsilon": found.epsilon,
        "target_epsilon": 2.0,
        "delta": 1e-5,
        "sample_rate": 0.05,
        "steps": 100,
        "beta": 0.8,
        "groups": 4,
        "accountant": "rdp",
    }
    assert report["epsilon"] <= 2.0


def test_calibrated_groups_spend_what_the_report_says() -> None:
    report = solved(5.0, 1e-5, 0.05, 50, beta=0.9, groups=3, accountant="prv")
    spent = costs(
        0.05,
        50,
        1e-5,
        beta=0.9,
        group_noise_multiplier=report["group_noise_multiplier"],
        groups=3,
    )
    assert report["accountant"] == "pld"
    assert spent["epsilon"]["pld"] <= 5.0
    assert spent["epsilon"]["pld"] == pytest.approx(report["epsilon"], rel=1e-6)


def test_calibration_report_refuses_bad_groups() -> None:
    with pytest.raises(ConfigError, match="groups 0"):
        solved(1.0, 1e-5, 0.1, 10, groups=0)
