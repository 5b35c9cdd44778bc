"""The command resume: what goes on, and what is refused in one line."""

from __future__ import annotations

import os
import re
import shutil
import signal

import pytest
import torch

from tests.support.cut_runs import STEPS, charged, config, cut_off, weights
from tests.support.program import plain, run, run_json
from tests.support.small_runs import private
from vestige import ConfigError, PrivacyError
from vestige.engine import checkpoint
from vestige.train import training

pytestmark = pytest.mark.usefixtures("empty_folder")


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[min(at, len(data) - 2)] ^= 1
    path.write_bytes(bytes(data))


def _cut_lines(path, count):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:count]))


def forge(folder, change):
    """Change a checkpoint, and make its hash right again."""
    state, secret = checkpoint.read(folder / "checkpoint.pt")
    change(state)
    checkpoint.write(folder / "checkpoint.pt", state, secret)


def test_an_interrupted_run_goes_on(tmp_path):
    whole = training.train(config(tmp_path / "whole"))

    def stop(progress):
        if progress.step == 8 and not progress.metrics:
            signal.raise_signal(signal.SIGINT)

    result = training.train(config(tmp_path / "part"), progress=stop)
    assert result["interrupted"]
    assert result["steps"] == 8
    assert charged(tmp_path / "part") == 8
    again = run_json("resume", str(tmp_path / "part"))
    assert not again["interrupted"]
    assert torch.equal(weights(tmp_path / "part"), weights(tmp_path / "whole"))
    assert again["epsilon"] == whole["epsilon"]
    assert charged(tmp_path / "part") == STEPS


def test_a_finished_run_prints_its_result(tmp_path):
    result = training.train(config(tmp_path / "run"))
    before = {p: p.read_bytes() for p in (tmp_path / "run").iterdir()}
    assert run_json("resume", str(tmp_path / "run"))["accuracy"] == result["accuracy"]
    shown = run("resume", str(tmp_path / "run"))
    assert shown.exit_code == 0
    assert "epsilon" in plain(shown.stdout)
    assert {p: p.read_bytes() for p in (tmp_path / "run").iterdir()} == before


def test_there_is_something_to_resume_before_the_first_lot(tmp_path):
    found = []

    def look(progress):
        if progress.stage == "training" and not found:
            found.extend(p.name for p in (tmp_path / "run").iterdir())
            state, _ = checkpoint.read(tmp_path / "run" / "checkpoint.pt")
            assert state["engine"]["released"] == 0

    training.train(config(tmp_path / "run"), progress=look)
    assert {"config.json", "checkpoint.pt", "ledger.jsonl"} <= set(found)


def test_the_command_line_says_so_in_one_line(tmp_path, monkeypatch):
    def full(file, content):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    line = "train --model linear --train-size 40 --lot 8 --steps 4 --accountant rdp --out run"
    shown = run(line)
    monkeypatch.undo()
    assert shown.exit_code == 1
    assert "No space left on device" in shown.stderr
    assert shown.stderr.count("\n") <= 1 + shown.stderr.count("epoch")
    assert not (tmp_path / "run").exists()  # nothing was released


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (lambda f: (f / "checkpoint.pt").unlink(), "neither checkpoint.pt nor result.json"),
        (lambda f: (f / "checkpoint.pt").write_bytes(b"abc"), "is no checkpoint"),
        (lambda f: _flip(f / "checkpoint.pt", 5000), "is damaged: its hash is"),
        (lambda f: _flip(f / "ledger.jsonl", 300), "line .* of the ledger .* is damaged"),
        (
            lambda f: _cut_lines(f / "ledger.jsonl", 4),
            "lacks .* releases of run .* the saved state",
        ),
        (lambda f: (f / "ledger.jsonl").unlink(), "is not there: put the run's own back"),
        (lambda f: (f / "result.json").write_text("{"), "result.json' is damaged"),
    ],
    ids=["gone", "no checkpoint", "flipped", "ledger", "cut ledger", "no ledger", "result"],
)
def test_a_damaged_run_is_refused_in_one_line(tmp_path, monkeypatch, damage, says):
    folder = cut_off(tmp_path / "cut", 10, monkeypatch)
    damage(folder)
    shown = run("resume", str(folder))
    assert shown.exit_code == 2
    assert shown.stderr.startswith("vestige: error: ")
    assert shown.stderr.count("\n") == 1
    assert re.search(says, shown.stderr), shown.stderr


def test_two_processes_do_not_resume_one_run(tmp_path, monkeypatch):
    folder = cut_off(tmp_path / "cut", 10, monkeypatch)
    from vestige.privacy.ledger_file import LedgerFile

    other = LedgerFile(folder / "ledger.jsonl")
    with pytest.raises(ConfigError, match="in use by another run"):
        training.resume(folder)
    other.close()
    assert training.resume(folder)["steps"] == STEPS


def test_a_resume_that_fails_lets_the_ledger_go(tmp_path, monkeypatch):
    folder = cut_off(tmp_path / "cut", 10, monkeypatch)
    shutil.copytree(folder, tmp_path / "copy")
    _cut_lines(folder / "ledger.jsonl", 4)
    with pytest.raises(PrivacyError, match="lacks"):
        training.resume(folder)
    shutil.copy(tmp_path / "copy" / "ledger.jsonl", folder / "ledger.jsonl")
    assert training.resume(folder)["steps"] == STEPS


def test_wrong_resumes_get_one_line(tmp_path, monkeypatch):
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=None)
    (tmp_path / "own").mkdir()
    private("dp-sgd")[0].save_checkpoint(tmp_path / "own" / "checkpoint.pt")
    for arguments, says in (
        (("resume", str(tmp_path / "cut"), "--noise-seed", "3"), "not in test mode"),
        (("resume", str(tmp_path / "own")), "by a loop of its own"),
    ):
        shown = run(*arguments)
        assert (shown.exit_code, shown.stderr.count("\n")) == (2, 1)
        assert says in shown.stderr
    (secret,) = (tmp_path / "cut").glob("*.secret")
    secret.write_text('{"torch": 5, "cuda": [], "noise_seed": null}')
    assert training.resume(tmp_path / "cut")["steps"] == STEPS


@pytest.mark.parametrize("content", ['{"a year of": "work"}', "a key", "two\nlines"])
@pytest.mark.parametrize("how", ["named", "linked", "in place"])
def test_a_run_folder_cannot_have_a_file_of_its_choice_opened(tmp_path, monkeypatch, content, how):
    folder = cut_off(tmp_path / "evil", 2, monkeypatch)
    victim = tmp_path / "precious.json"
    victim.write_text(content)
    if how == "named":
        forge(folder, lambda state: state["others"]["config"].update(ledger=str(victim)))
    else:
        (folder / "ledger.jsonl").unlink()
        (folder / "ledger.jsonl").symlink_to(victim)
    if how == "in place":
        (folder / "ledger.jsonl").unlink()
        (folder / "ledger.jsonl").write_text(content)
    refused = "is not that of a ledger" if how == "in place" else "outside of its folder"
    for line in (f"resume {folder}", f"statement {folder}"):
        result = run(line)
        assert result.exit_code == 2 and refused in plain(result.stderr), result.stderr
        assert victim.read_text() == content
    if how != "in place":
        # Whoever names it gets it, and it is still no ledger.
        assert "is not that of a ledger" in plain(run(f"resume {folder} --ledger {victim}").stderr)
        assert victim.read_text() == content
