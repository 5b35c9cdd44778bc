"""The command `vestige audit`."""

from __future__ import annotations

import json

import pytest
import torch
from typer.testing import CliRunner

from vestige.cli.app import app
from vestige.release.door import Door


def command(*arguments):
    return CliRunner().invoke(app, ["audit", *arguments])


KEYS = {
    "epsilon_lower",
    "epsilon_lower_family",
    "epsilon_claimed",
    "epsilon_published",
    "confidence",
    "trials",
    "seconds",
    "method",
    "mode",
    "delta",
    "steps",
    "sample_rate",
    "noise_multiplier",
    "seeded",
}

QUICK = ("--noise-multiplier", "1.5", "--steps", "2", "--trials", "200", "--seed", "1")


@pytest.mark.parametrize("mode", ["canary", "one-run"])
def test_the_command_prints_json_alone(mode):
    ran = command("--method", "fo", "--mode", mode, "--json", *QUICK)
    assert ran.exit_code == 0, ran.output
    found = json.loads(ran.stdout)
    assert set(found) >= KEYS
    assert found["mode"] == mode and found["trials"] == 200 and found["seeded"]
    assert (found["epsilon_lower_family"] is None) == (mode == "one-run")
    assert "seed" not in found  # a seed is never written down


def test_the_command_writes_a_folder_and_speaks_plainly(tmp_path):
    ran = command("--method", "dp-sgd", "--out", str(tmp_path / "a"), *QUICK)
    assert ran.exit_code == 0
    assert "Not refuted" in ran.stdout and "no proof" in ran.stdout
    assert (tmp_path / "a" / "tradeoff.png").stat().st_size > 10_000
    assert set(json.loads((tmp_path / "a" / "audit.json").read_text())) >= KEYS


def test_a_violated_claim_of_the_engine_ends_with_exit_code_1(monkeypatch):
    monkeypatch.setattr(Door, "_noise", lambda *_: iter([(slice(0, 10**6), torch.zeros(1), 0.0)]))
    ran = command("--method", "dp-sgd", *QUICK)
    assert ran.exit_code == 1 and "VIOLATED" in ran.stdout


def test_a_violated_publication_is_a_result_and_not_a_failure():
    ran = command("--method", "geodp", "--epsilon", "1", "--trials", "300", "--seed", "1")
    assert ran.exit_code == 0
    assert "VIOLATED" in ran.stdout and "No guarantee is given" in ran.stdout


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--method", "nope"), "method='nope' is unknown"),
        (("--method", "fo", "--mode", "both"), "mode='both' is unknown"),
        (("--method", "fo", "--epsilon", "1", "--noise-multiplier", "1"), "give one of them"),
        (("--method", "fo", "--noise-multiplier", "0"), "noise_multiplier=0.0 must be"),
        (("--method", "fo", "--epsilon", "-1"), "epsilon=-1.0 must be"),
        (("--method", "fo", "--trials", "10"), "trials=10 is too small"),
        (("--method", "fo", "--confidence", "1"), "confidence=1.0 must be"),
        (("--method", "fo", "--confidence", "0"), "confidence=0.0 must be"),
        (("--method", "fo", "--delta", "2"), "delta=2.0 must be"),
        (("--method", "fo", "--steps", "0"), "steps=0"),
        (("--method", "fo", "--sample-rate", "1"), "sample_rate=1.0 must be"),
        (("--method", "fo", "--clipping", "nope"), "clipping='nope' is unknown"),
        (("--method", "dp-is", "--clipping", "per_layer"), "use flat clipping"),
        (("--method", "fo", "--out", "plot.gif"), "no known image format"),
    ],
    ids=lambda value: None if isinstance(value, str) else " ".join(value[2:]) or "method",
)
def test_bad_input_is_one_line_and_exit_code_2(arguments, words):
    ran = command(*arguments)
    assert ran.exit_code == 2
    assert words in ran.stderr and ran.stderr.count("\n") == 1 and ran.stdout == ""
