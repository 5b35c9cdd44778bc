"""The command ledger, and budgets on the command line."""

from __future__ import annotations

import json
import os

import pytest

from tests.support.cut_runs import STEPS, TRAIN, config, cut_off
from tests.support.program import plain, run, run_json
from tests.support.small_runs import private
from vestige import ConfigError
from vestige.train import training

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_max_epsilon_stops_the_command(tmp_path):
    shown = run(f"{TRAIN} --steps 40 --max-epsilon 6 --out {tmp_path}/run")
    assert shown.exit_code == 0
    assert "one more would exceed max_epsilon 6" in shown.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["budget_spent"]
    assert not result["interrupted"]
    assert 0 < result["steps"] < 40
    assert result["epsilon"] <= 6
    assert not (tmp_path / "run" / "checkpoint.pt").exists()
    again = run("resume", str(tmp_path / "run"), "--json")
    assert again.exit_code == 0
    assert json.loads(again.stdout)["steps"] == result["steps"]


def test_max_epsilon_holds_across_a_resume(tmp_path, monkeypatch):
    whole = training.train(config(tmp_path / "whole", steps=40, max_epsilon=8.0))
    cut_off(tmp_path / "cut", 6, monkeypatch, steps=40, max_epsilon=8.0)
    result = training.resume(tmp_path / "cut")
    assert result["budget_spent"]
    assert whole["epsilon"] <= 8
    assert result["epsilon"] <= 8
    assert result["steps"] == whole["steps"]


def test_runs_that_share_a_ledger_compose(tmp_path):
    line = f"{TRAIN} --steps 6 --ledger {tmp_path}/shared.jsonl"
    first = run_json(line, "--out", str(tmp_path / "a"))
    second = run_json(line, "--out", str(tmp_path / "b"))
    assert first["earlier_releases"] == 0
    assert second["earlier_releases"] == 6
    assert second["epsilon"] > first["epsilon"]
    shown = run_json("ledger show", str(tmp_path / "shared.jsonl"))
    assert shown["releases"] == 12
    assert shown["epsilon"]["rdp"] == second["epsilon"]
    assert [r["about"]["method"] for r in shown["runs"]] == ["dp-sgd", "dp-sgd"]


def test_a_target_counts_what_others_have_spent(tmp_path):
    line = f"{TRAIN} --steps 6 --ledger {tmp_path}/shared.jsonl"
    first = run_json(line, "--noise-multiplier", "3", "--out", str(tmp_path / "a"))
    second = run_json(line, "--epsilon", "4", "--out", str(tmp_path / "b"))
    assert first["epsilon"] < 4
    assert 3.9 < second["epsilon"] <= 4
    alone = run_json(f"{TRAIN} --steps 6 --epsilon 4", "--out", str(tmp_path / "c"))
    assert second["noise_multiplier"] > alone["noise_multiplier"]


def test_ledger_commands_explain_themselves(tmp_path):
    for name in ("a", "b"):
        run_json(f"{TRAIN} --steps 3", "--out", str(tmp_path / name))
    merged = run_json(f"ledger merge {tmp_path}/a {tmp_path}/b --out {tmp_path}/all.jsonl")
    assert merged["releases"] == 6
    assert merged["guarantee"].startswith("(epsilon, delta)-DP")
    text = plain(run(f"ledger show {tmp_path}/all.jsonl").stdout)
    assert "6 at sampling rate 0.2, noise multiplier 1.0" in text
    assert "epsilon by pld at delta 1e-05" in text
    for wrong, says in (
        (f"ledger show {tmp_path}/none", "cannot be read"),
        (f"ledger show {tmp_path}", "has no ledger.jsonl"),
        (f"ledger merge {tmp_path}/a --out {tmp_path}/x", "at least two"),
        (f"ledger merge {tmp_path}/a {tmp_path}/b --out {tmp_path}/all.jsonl", "overwritten"),
        (f"resume {tmp_path}/none", "is no folder"),
        (f"resume {tmp_path}", "neither"),
    ):
        shown = run(wrong)
        assert (shown.exit_code, says in shown.stderr) == (2, True), (wrong, shown.stderr)


def test_a_shared_ledger_is_named_on_the_command_line(tmp_path, monkeypatch):
    folder, shared = tmp_path / "cut", tmp_path / "shared.jsonl"
    cut_off(folder, 2, monkeypatch, ledger=shared, noise_seed=None)
    moved = tmp_path / "moved.jsonl"
    shared.rename(moved)
    stated = run_json(f"statement {folder} --ledger {moved}")
    assert stated["ledger"]["charged"] == 3
    assert run_json(f"resume {folder} --ledger {moved}")["steps"] == STEPS
    assert not shared.exists()


@pytest.mark.parametrize("path", ["/dev/null", "/dev/zero", ".", "pipe", "config.json"])
def test_a_ledger_that_keeps_nothing_is_refused_before_anything_is_made(tmp_path, path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "config.json").write_text('{"lr": 0.1}')
    for line in (f"{TRAIN} --steps 2 --out a --ledger {path}", f"ledger show {path}"):
        result = run(line)
        assert result.exit_code == 2, result.stderr
        assert "ledger" in plain(result.stderr) and "Traceback" not in result.stderr
        assert len(plain(result.stderr).strip().splitlines()) == 1
    assert (tmp_path / "config.json").read_text() == '{"lr": 0.1}'
    assert not (tmp_path / "a").exists()
    with pytest.raises(ConfigError, match="ledger"):
        private("dp-sgd", engine_options={"ledger": tmp_path / path})


def test_an_empty_ledger_is_not_shown_as_nothing_spent(tmp_path):
    (tmp_path / "l").touch()
    assert "is empty: no run was opened on it" in plain(run(f"ledger show {tmp_path}/l").stderr)
