"""Checkpoints and resuming: what goes on bit for bit, what is charged, and what is refused."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import stat
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.support.program import plain, run, run_json
from tests.support.small_runs import private
from tests.support.small_runs import run as steps_of
from vestige import ConfigError, PrivacyEngine, PrivacyError, StorageError
from vestige.engine import checkpoint
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.privacy.ledger_file import read
from vestige.release.door import Door
from vestige.sampling.streams import Randomness
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.run_folder import RunWriter

STEPS = 17
SMALL = {
    "model": "linear",
    "train_size": 40,
    "test_size": 20,
    "lot": 8,
    "steps": STEPS,
    "accountant": "rdp",
    "device": "cpu",
    "noise_multiplier": 1.0,
    "checkpoint_every": 3,
}


@pytest.fixture(autouse=True)
def _in_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def config(folder, **changes):
    return TrainConfig(**{**SMALL, "noise_seed": 5, "out": folder, **changes})


class Cut(Exception):  # noqa: N818
    """Stands for a crash: nothing after it is tidied up."""


def cut_off(folder, at, monkeypatch, **changes):
    """A run whose process dies in step `at`, after its noise was drawn."""
    release = Door.release

    def dying(door, *args, **kwargs):
        made = release(door, *args, **kwargs)
        if door.steps > at:
            os.close(door.ledger.file._file)
            door.ledger.file._closed = True
            raise Cut
        return made

    monkeypatch.setattr(Door, "release", dying)
    with pytest.raises(Cut):
        training.train(config(folder, **changes))
    monkeypatch.setattr(Door, "release", release)
    return folder


def weights(folder):
    return torch.cat([v.flatten() for v in torch.load(folder / "model.pt").values()])


def charged(folder):
    return sum(event.count for event in read(folder / "ledger.jsonl").events)


# -- going on -------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "sma", "dp-adam", "dp-sam", "dp-ftrl"])
def test_in_test_mode_a_resumed_run_is_the_uninterrupted_one(tmp_path, monkeypatch, method):
    whole = training.train(config(tmp_path / "whole", method=method))
    cut_off(tmp_path / "cut", 10, monkeypatch, method=method)
    result = training.resume(tmp_path / "cut")
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
    assert result["steps"] == STEPS
    assert result["epsilon"] >= whole["epsilon"]
    lines = [
        [json.loads(line) for line in (tmp_path / f / "metrics.jsonl").read_text().splitlines()]
        for f in ("whole", "cut")
    ]
    kept = ("step", "epoch", "test_loss", "test_accuracy")
    assert [[e[k] for k in kept] for e in lines[0]] == [[e[k] for k in kept] for e in lines[1]]


def test_what_was_compared_is_not_charged_twice(tmp_path, monkeypatch):
    """Steps 9 and 10 were released before the crash: the same digest, the same charge."""
    cut_off(tmp_path / "cut", 10, monkeypatch)
    before = charged(tmp_path / "cut")
    assert before == 11
    result = training.resume(tmp_path / "cut")
    assert charged(tmp_path / "cut") == STEPS
    assert result["lost_releases"] == 0


def test_a_replay_that_differs_stops(tmp_path, monkeypatch):
    """The same noise over another sum would reveal the difference."""
    values = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    labels = np.arange(60) % 3
    for name, first in (("data", 0.0), ("other", 5.0)):
        changed = values.copy()
        changed[:20] += first
        (tmp_path / name).mkdir()
        np.savez(
            tmp_path / name / "d.npz",
            x_train=changed, y_train=labels, x_test=values, y_test=labels, classes=3,
        )  # fmt: skip
    changes = {"train_size": None, "test_size": None, "dataset": "d.npz"}
    monkeypatch.chdir(tmp_path / "data")
    cut_off(tmp_path / "cut", 10, monkeypatch, **changes)
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(PrivacyError, match=r"release 9 differs from the one.*reveal"):
        training.resume(tmp_path / "cut")
    monkeypatch.chdir(tmp_path / "data")
    assert training.resume(tmp_path / "cut")["steps"] == STEPS


def test_otherwise_lost_steps_stay_charged_and_noise_is_new(tmp_path, monkeypatch):
    drawn = []
    normal_blocks = Randomness.normal_blocks

    def watched(self, like, step, purpose=b"noise"):
        for at, noise in normal_blocks(self, like, step, purpose):
            drawn.append(noise.clone())
            yield at, noise

    monkeypatch.setattr(Randomness, "normal_blocks", watched)
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=None)
    shutil.copytree(tmp_path / "cut", tmp_path / "fork")
    results = [training.resume(tmp_path / name) for name in ("cut", "fork")]
    for result in results:
        assert result["steps"] == STEPS
        assert result["lost_releases"] == 2  # steps 9 and 10, after the checkpoint at 9
        spent = accounting.epsilon(read(tmp_path / "cut" / "ledger.jsonl").events, 1e-5, "rdp")
        assert result["epsilon"] == spent
    assert charged(tmp_path / "cut") == charged(tmp_path / "fork") == 11 + (STEPS - 9)
    assert not torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "fork"))
    assert len({noise.numpy().tobytes() for noise in drawn}) == len(drawn) == 11 + 2 * (STEPS - 9)
    # Both went on, so both count, and what they share counts once.
    run(f"ledger merge {tmp_path}/cut {tmp_path}/fork --out {tmp_path}/all")
    assert sum(e.count for e in read(tmp_path / "all").events) == 11 + 2 * (STEPS - 9)


def test_a_crash_charges_the_whole_open_block(tmp_path, monkeypatch):
    """800 planned steps are reserved 16 at a time."""
    cut_off(tmp_path / "cut", 2, monkeypatch, steps=800, checkpoint_every=800)
    assert charged(tmp_path / "cut") == 16


@pytest.fixture
def _interrupts():
    """Ctrl-C as in a program that was started from a terminal, whatever runs the tests."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_interrupts")
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


def test_the_default_is_a_checkpoint_every_epoch(tmp_path, monkeypatch):
    saved = []
    write = checkpoint.write
    monkeypatch.setattr(
        checkpoint,
        "write",
        lambda path, state, secret: (
            saved.append(state["engine"]["released"]),
            write(path, state, secret),
        ),
    )
    training.train(config(tmp_path / "run", checkpoint_every=None))
    assert saved == [0, 5, 10, 15]


# -- secrets --------------------------------------------------------------------------------


def test_secrets_are_apart_and_only_their_owner_reads_them(tmp_path, monkeypatch):
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=987654321)
    (secret,) = (tmp_path / "cut").glob("*.secret")
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert "987654321" in secret.read_text()
    state = torch.get_rng_state().numpy().tobytes()
    for file in (tmp_path / "cut").iterdir():
        if file != secret:
            assert b"987654321" not in file.read_bytes()
            assert state[:64].hex().encode() not in file.read_bytes()
    secret.unlink()
    with pytest.raises(ConfigError, match=r"test mode.*noise_seed"):
        training.resume(tmp_path / "cut")
    assert training.resume(tmp_path / "cut", noise_seed=987654321)["steps"] == STEPS
    assert not list((tmp_path / "cut").glob("*.secret"))


def test_the_state_of_torchs_generators_goes_on(tmp_path):
    """Dropout after a resume is that of the uninterrupted run."""
    from torch import nn

    def start():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        return private("fo", model=model)

    whole = start()
    steps_of(*whole, steps=10)
    first = start()
    steps_of(*first, steps=4)
    first[0].save_checkpoint(tmp_path / "c")
    second = start()
    torch.manual_seed(99)
    second[0].load_checkpoint(tmp_path / "c")
    steps_of(*second, steps=6)
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)


# -- own loops ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["dp-sgd", "fo", "dp-adam", "dp-is"])
def test_a_checkpoint_of_an_own_loop_goes_on_bit_for_bit(tmp_path, method):
    options = {"engine_options": {"ledger": tmp_path / "l"}}
    whole = private(method)
    schedule = torch.optim.lr_scheduler.StepLR(whole[2], 3, 0.5)
    steps_of(*whole, steps=11, after=schedule.step)
    first = private(method, **options)
    schedule = torch.optim.lr_scheduler.StepLR(first[2], 3, 0.5)
    steps_of(*first, steps=5, after=schedule.step)
    first[0].save_checkpoint(tmp_path / "c", schedule=schedule, note={"best": 0.5})
    first[0].detach()
    second = private(method, **options)
    schedule = torch.optim.lr_scheduler.StepLR(second[2], 3, 0.5)
    assert second[0].load_checkpoint(tmp_path / "c", schedule=schedule) == {"note": {"best": 0.5}}
    steps_of(*second, steps=6, after=schedule.step)
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)
    assert second[0].get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)


def test_saving_in_the_middle_of_a_lot_is_refused(tmp_path):
    engine, _, _, loader = private("dp-sgd")
    next(iter(loader))
    with pytest.raises(PrivacyError, match="middle of a lot"):
        engine.save_checkpoint(tmp_path / "c")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"method": "fo"}, "method: dp-sgd -> fo"),
        ({"max_grad_norm": 2.0}, "bounds"),
        ({"model": "other"}, r"another model \(0.bias.*absent -> .*9"),
        ({"data_name": "letters"}, "other data.*name: None -> letters"),
        ({"optimizer": torch.optim.SGD}, "optimizer Adam, not of SGD"),
    ],
    ids=["method", "bounds", "model", "data", "optimizer"],
)
def test_another_run_is_refused_and_named_and_nothing_changes(tmp_path, changes, says):
    from torch import nn

    def adam(parameters):
        return torch.optim.Adam(parameters, lr=0.01)

    saved = private("dp-sgd", optimizer=adam)
    steps_of(*saved, steps=3)
    saved[0].save_checkpoint(tmp_path / "c")
    options = {"method": "dp-sgd", "optimizer": adam} | changes
    if options["optimizer"] is torch.optim.SGD:
        options["optimizer"] = lambda parameters: torch.optim.SGD(parameters, lr=0.01)
    if options.get("model") == "other":
        options["model"] = nn.Sequential(
            nn.Linear(5, 9), nn.Tanh(), nn.Linear(9, 3), nn.Linear(3, 3)
        ).double()
    engine, model, *_ = private(**options)
    before = [p.clone() for p in model.parameters()]
    says = says.replace("0.bias.*absent -> .*9", r"0.bias: \[8\] torch.float64 -> \[9\]")
    with pytest.raises((ConfigError, PrivacyError), match=says):
        engine.load_checkpoint(tmp_path / "c")
    assert engine.released == engine.ledger.steps == 0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# -- what goes wrong ------------------------------------------------------------------------


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO])
def test_a_full_or_unwritable_disk_ends_with_a_message_and_the_earlier_checkpoint(
    tmp_path, monkeypatch, code
):
    write, left = os.write, [40]

    def filling(file, content):
        left[0] -= 1
        if left[0] < 0:
            write(file, bytes(content)[: len(content) // 2])
            raise OSError(code, os.strerror(code))
        return write(file, content)

    monkeypatch.setattr(os, "write", filling)
    with pytest.raises(StorageError, match=os.strerror(code)):
        training.train(config(tmp_path / "run"))
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    state, secret = checkpoint.read(tmp_path / "run" / "checkpoint.pt")
    assert state["engine"]["released"] % 3 == 0
    assert secret is not None
    assert not list((tmp_path / "run").glob(".*.partial"))
    training.train(config(tmp_path / "whole"))
    training.resume(tmp_path / "run")
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))


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


def _flip(path, at):
    data = bytearray(path.read_bytes())
    data[min(at, len(data) - 2)] ^= 1
    path.write_bytes(bytes(data))


def _cut_lines(path, count):
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:count]))


def test_a_checkpoint_with_code_in_it_does_not_run_it(tmp_path):
    import hashlib
    import io
    import pickle

    class Evil:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "owned"),))

    for payload in (pickle.dumps(Evil()), None):
        if payload is None:
            buffer = io.BytesIO()
            torch.save({"engine": Evil()}, buffer)
            payload = buffer.getvalue()
        digest = hashlib.sha256(payload).hexdigest().encode()
        (tmp_path / "c").write_bytes(b"vestige checkpoint 1\n" + digest + b"\n" + payload)
        with pytest.raises(ConfigError, match="something else than numbers and tensors"):
            checkpoint.read(tmp_path / "c")
        assert not (tmp_path / "owned").exists()


def test_two_processes_do_not_resume_one_run(tmp_path, monkeypatch):
    folder = cut_off(tmp_path / "cut", 10, monkeypatch)
    from vestige.privacy.ledger_file import LedgerFile

    other = LedgerFile(folder / "ledger.jsonl")
    with pytest.raises(ConfigError, match="in use by another run"):
        training.resume(folder)
    other.close()
    assert training.resume(folder)["steps"] == STEPS


# -- budgets and ledgers on the command line -------------------------------------------------


TRAIN = "train --model linear --train-size 40 --test-size 20 --lot 8 --accountant rdp"


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


# -- what a reviewer found -------------------------------------------------------------------


def test_a_checkpoint_is_not_loaded_into_a_run_that_goes_on(tmp_path):
    """Going back under the same key would put the same noise over other sums."""
    for options in ({}, {"engine_options": {"ledger": tmp_path / "l", "noise_seed": None}}):
        engine, *rest = private("dp-sgd", **options)
        engine.save_checkpoint(tmp_path / "c")
        steps_of(engine, *rest, steps=3)
        with pytest.raises(PrivacyError, match="has drawn lots"):
            engine.load_checkpoint(tmp_path / "c")
        fresh = private("dp-sgd")
        next(iter(fresh[3]))
        fresh[0].abandon_lot()
        with pytest.raises(PrivacyError, match="has drawn lots"):
            fresh[0].load_state_dict(private("dp-sgd")[0].state_dict())


def test_the_spending_of_others_does_not_stand_in_for_ones_own(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "a"})
    steps_of(*first, steps=5)
    first[0].save_checkpoint(tmp_path / "c")
    first[0].detach()
    other = private("dp-sgd", engine_options={"ledger": tmp_path / "b"})
    steps_of(*other, steps=9)
    other[0].detach()
    resumed = private("dp-sgd", engine_options={"ledger": tmp_path / "b"})
    with pytest.raises(PrivacyError, match="lacks 5 releases"):
        resumed[0].load_checkpoint(tmp_path / "c")
    assert resumed[0].released == 0


def test_a_run_with_a_ledger_file_does_not_go_on_without(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "a"})
    steps_of(*first, steps=2)
    first[0].save_checkpoint(tmp_path / "c")
    with pytest.raises(PrivacyError, match="ledger in a file"):
        private("dp-sgd")[0].load_checkpoint(tmp_path / "c")


def test_a_ledger_is_not_made_anew_by_a_resume(tmp_path, monkeypatch):
    """Also where nothing was charged yet when the checkpoint was made."""
    (tmp_path / "sub").mkdir()
    cut_off(tmp_path / "cut", 2, monkeypatch, checkpoint_every=100, ledger=Path("shared.jsonl"))
    monkeypatch.chdir(tmp_path / "sub")
    with pytest.raises(ConfigError, match=r"outside of its folder.*shared.jsonl' is yours"):
        training.resume(tmp_path / "cut")
    result = training.resume(tmp_path / "cut", ledger=tmp_path / "shared.jsonl")
    assert sum(e.count for e in read(tmp_path / "shared.jsonl").events) == STEPS
    assert result["epsilon"] > 0
    assert not (tmp_path / "sub" / "shared.jsonl").exists()
    monkeypatch.chdir(tmp_path)
    cut_off(tmp_path / "again", 2, monkeypatch, checkpoint_every=100)
    (tmp_path / "again" / "ledger.jsonl").write_bytes(b"")
    with pytest.raises(PrivacyError, match="lacks 0 releases of run"):
        training.resume(tmp_path / "again")


def test_engines_that_share_a_ledger_have_names_of_their_own(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    shared = {"engine_options": {"ledger": first[0].ledger}}
    second = private("dp-sgd", noise_multiplier=2.0, **shared)
    steps_of(*first, steps=3)
    steps_of(*second, steps=5)
    assert (first[0].charged, first[0].earlier) == (3, 5)
    assert (second[0].charged, second[0].earlier) == (5, 3)
    first[0].save_checkpoint(tmp_path / "c")
    first[0].close()
    spent = {r.about["steps"]: r.events for r in read(tmp_path / "l").runs.values()}
    assert len(read(tmp_path / "l").runs) == 2
    assert sum(e.count for e in read(tmp_path / "l").events) == 8, spent
    third = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    third[0].load_checkpoint(tmp_path / "c")
    assert (third[0].charged, third[0].earlier, third[0].lost) == (3, 5, 0)


def test_a_refused_data_set_stays_refused(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "l"}, data_name="a")
    steps_of(*first, steps=1)
    for _ in range(2):
        with pytest.raises(ConfigError, match="different data"):
            private("dp-sgd", engine_options={"ledger": first[0].ledger}, data_name="b")


def test_a_ledger_that_was_charged_meanwhile_is_noticed(tmp_path):
    ledger = tmp_path / "l"
    prepared = training.prepare(config(tmp_path / "b", epsilon=3.0, noise_multiplier=None,
                                       ledger=ledger))  # fmt: skip
    training.train(config(tmp_path / "a", ledger=ledger))
    with pytest.raises(ConfigError, match="charged by another run while"):
        RunWriter(prepared).run(lambda _: None)
    assert not (tmp_path / "b").exists()


def test_secrets_belong_to_one_checkpoint(tmp_path):
    engine, *_ = private("dp-sgd")
    for name in ("ckpt", "ckpt.10", "ckpt.pt", "c[1].pt"):
        for _ in range(2):
            engine.save_checkpoint(tmp_path / name)
    assert len(list(tmp_path.glob("*.secret"))) == 4
    for name in ("ckpt", "ckpt.10", "ckpt.pt", "c[1].pt"):
        assert checkpoint.read(tmp_path / name)[1] is not None


def test_what_cannot_be_read_back_is_not_saved(tmp_path):
    def with_numpy(parameters):
        return torch.optim.SGD(parameters, lr=np.float64(0.05))

    engine, *_ = private("dp-sgd", optimizer=with_numpy)
    engine.save_checkpoint(tmp_path / "c", best=np.float64(0.5), scores=[np.int64(3)])
    again, *_ = private("dp-sgd", optimizer=with_numpy)
    assert again.load_checkpoint(tmp_path / "c") == {"best": 0.5, "scores": [3]}
    with pytest.raises(ConfigError, match=r"checkpoint\['others'\]\['thing'\] is a object"):
        engine.save_checkpoint(tmp_path / "d", thing=object())
    assert not (tmp_path / "d").exists()


def test_a_finished_run_leaves_no_secret(tmp_path, monkeypatch):
    """Whatever a crash has left of earlier ones."""
    cut_off(tmp_path / "cut", 10, monkeypatch)
    left = tmp_path / "cut" / ".checkpoint.pt.0123456789ab.secret.partial"
    left.write_text("half")
    training.resume(tmp_path / "cut")
    assert not [p for p in (tmp_path / "cut").iterdir() if "secret" in p.name]
    left.write_text("half")
    (tmp_path / "cut" / "checkpoint.pt").write_text("left by a kill")
    training.resume(tmp_path / "cut")
    assert not [p for p in (tmp_path / "cut").iterdir() if "checkpoint" in p.name]


def test_a_replay_does_not_count_against_the_budget(tmp_path, monkeypatch):
    whole = training.train(config(tmp_path / "whole", steps=40, max_epsilon=6.0))
    cut_off(tmp_path / "cut", whole["steps"] - 1, monkeypatch, steps=40, max_epsilon=6.0)
    result = training.resume(tmp_path / "cut")
    assert result["budget_spent"]
    assert result["steps"] == whole["steps"]
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))


def test_dropout_goes_on_in_the_middle_of_an_epoch_of_any_data_set(tmp_path):
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Own(Dataset):
        def __len__(self):
            return 24

        def __getitem__(self, index):
            return torch.full((5,), index / 24).double(), index % 3

    def start():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(5, 8), nn.Dropout(0.5), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = PrivacyEngine("rdp", noise_seed=4)
        return engine, *engine.make_private(
            module=model,
            optimizer=optimizer,
            data_loader=DataLoader(Own(), batch_size=6),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

    whole = start()
    steps_of(*whole, steps=7)
    first = start()
    steps_of(*first, steps=2)
    first[0].save_checkpoint(tmp_path / "c")
    second = start()
    second[0].load_checkpoint(tmp_path / "c")
    steps_of(*second, steps=5)
    for a, b in zip(whole[1].parameters(), second[1].parameters(), strict=True):
        assert torch.equal(a, b)


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


def test_a_killed_run_has_a_statement_of_all_that_it_was_charged(tmp_path, monkeypatch):
    cut_off(tmp_path / "cut", 10, monkeypatch, noise_seed=None)
    stated = run_json("statement", str(tmp_path / "cut"))
    events = read(tmp_path / "cut" / "ledger.jsonl").events
    # Nine steps were saved; the others were planned, and may still be made.
    planned = [*events, Event(0.2, 1.0, STEPS - 9)]
    assert stated["guarantee"]["epsilon"] == accounting.epsilon(planned, 1e-5, "rdp")
    assert stated["guarantee"]["end"]["kind"] == "planned releases"
    assert stated["ledger"]["charged"] == 11
    assert stated["ledger"]["over_reported"] == 2
    training.resume(tmp_path / "cut")
    after = run_json("statement", str(tmp_path / "cut"))
    assert after["ledger"]["charged"] == 11 + (STEPS - 9)
    assert after["ledger"]["over_reported"] == 2


def test_a_run_is_not_continued_beside_itself(tmp_path):
    """Two engines under one name would give back each other's reserves."""
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "l", "noise_seed": None})
    steps_of(*first, steps=5)
    first[0].save_checkpoint(tmp_path / "c")
    shared = {"engine_options": {"ledger": first[0].ledger, "noise_seed": None}}
    with pytest.raises(PrivacyError, match="going on in another engine"):
        private("dp-sgd", **shared)[0].load_checkpoint(tmp_path / "c")
    second = private("dp-sgd", **shared)
    steps_of(*first, steps=3)
    first[0].detach()
    second[0].load_checkpoint(tmp_path / "c")
    steps_of(*second, steps=10)
    second[0].close()
    assert sum(e.count for e in read(tmp_path / "l").events) == 5 + 3 + 10


def test_what_the_state_knows_of_others_must_be_in_the_file(tmp_path):
    path = tmp_path / "l"
    other = private("dp-sgd", engine_options={"ledger": path}, noise_multiplier=2.0)
    steps_of(*other, steps=4)
    other[0].detach()
    own = private("dp-sgd", engine_options={"ledger": path})
    steps_of(*own, steps=3)
    own[0].save_checkpoint(tmp_path / "c")
    own[0].detach()
    alone = private("dp-sgd", engine_options={"ledger": tmp_path / "alone"})
    steps_of(*alone, steps=1)
    alone[0].detach()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: next(i for i, x in enumerate(lines) if b"2.0" in x)]))
    with pytest.raises(PrivacyError, match="lacks"):
        private("dp-sgd", engine_options={"ledger": path})[0].load_checkpoint(tmp_path / "c")


def test_names_and_texts_of_numpy_are_saved_as_plain_ones(tmp_path):
    engine, *_ = private("dp-sgd")
    engine.save_checkpoint(tmp_path / "c", name=np.str_("a"), table={np.int64(3): [np.bool_(True)]})
    found = private("dp-sgd")[0].load_checkpoint(tmp_path / "c")
    assert found == {"name": "a", "table": {3: [True]}}
    assert type(found["name"]) is str
    assert type(next(iter(found["table"]))) is int


def test_a_short_secret_is_no_secret(tmp_path):
    private("dp-sgd")[0].save_checkpoint(tmp_path / "c")
    (secret,) = tmp_path.glob("c.*.secret")
    secret.write_text('{"torch": "00", "cuda": [], "noise_seed": null}')
    private("dp-sgd")[0].load_checkpoint(tmp_path / "c")


def test_a_refused_setting_leaves_no_lock_behind(tmp_path):
    engine = PrivacyEngine("rdp", ledger=tmp_path / "l")
    with pytest.raises(ConfigError):
        engine.make_private(module=None, optimizer=None, data_loader=None, max_grad_norm=1.0)
    made = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    steps_of(*made, steps=1)
    shared = private("dp-sgd", engine_options={"ledger": made[0].ledger})
    made[0].detach()
    steps_of(*shared, steps=1)
    shared[0].detach()
    again = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    assert again[0].earlier == 2


def test_a_step_inside_a_step_is_one_release():
    """torch hooks the step of every class whose objects were made, the parent's too."""

    class Counting(torch.optim.SGD):
        def step(self, closure=None):
            self.calls = getattr(self, "calls", 0) + 1
            return super().step(closure)

    plain = private("dp-sgd", averaging="ema")
    steps_of(*plain, steps=5)
    own = private("dp-sgd", optimizer=lambda p: Counting(p, lr=0.05), averaging="ema")
    steps_of(*own, steps=5)
    assert own[2].calls == own[0].released == own[0].ledger.steps == 5
    for a, b in zip(plain[1].parameters(), own[1].parameters(), strict=True):
        assert torch.equal(a, b)
    one, two = plain[0].averaged_state_dict(), own[0].averaged_state_dict()
    assert all(torch.equal(one[k], two[k]) for k in one)


# -- ledgers that others have, or that a folder names ---------------------------------------


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


def forge(folder, change):
    """Change a checkpoint, and make its hash right again."""
    state, secret = checkpoint.read(folder / "checkpoint.pt")
    change(state)
    checkpoint.write(folder / "checkpoint.pt", state, secret)


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


def test_runs_of_two_relations_and_a_seeded_one_on_one_ledger(tmp_path):
    line = f"{TRAIN} --steps 6 --noise-multiplier 5 --ledger l.jsonl"
    first = run_json(line, "--method", "dp-ftrl", "--out", "a")
    second = run_json(line, "--out", "b")
    for result in (first, second):
        assert "zero out one record" in result["adjacency"]
        assert "zero out one record" in result["guarantee"]
        assert "add or remove" not in result["guarantee"]
    assert any("another adjacency" in caveat for caveat in second["caveats"])
    stated = run_json("statement b")
    assert stated["status"] == "private" and "zero out one record" in stated["guarantee"]["kind"]
    shown = run_json("ledger show l.jsonl")
    assert not shown["test_mode"] and "zero out one record" in shown["guarantee"]
    seeded = run_json(line, "--noise-seed", "1", "--out", "c")
    fourth = run_json(line, "--out", "d")
    assert seeded["repeatable_noise"] and not fourth["repeatable_noise"]
    assert any("another run on the ledger was in test mode" in c for c in fourth["caveats"])
    stated = run_json("statement d")
    assert stated["status"] == "test mode" and "an earlier run" in stated["headline"]
    assert "Not for signature" in plain(run("statement d").stdout)
    assert run_json("ledger show l.jsonl")["test_mode"]
    last = plain(run("ledger show l.jsonl").stdout).rpartition("guarantee:")[2]
    assert "test mode" in last
    # A copy of the spending is no cleaner, nor is what is merged from it.
    run_json(f"{TRAIN} --steps 2 --out e")
    assert run_json("ledger merge l.jsonl e --out all.jsonl")["test_mode"]


def test_a_target_that_the_ledger_has_used_up_is_refused_at_once(tmp_path):
    line = "train --model linear --train-size 200 --test-size 20 --lot 20 --epochs 2 --device cpu"
    line += " --epsilon 2 --ledger l.jsonl"
    assert run_json(line, "--out", "a")["epsilon"] <= 2
    started = time.perf_counter()
    result = run(f"{line} --out b")
    assert time.perf_counter() - started < 20
    assert result.exit_code == 2
    assert "target_epsilon 2.0 is used up by the ledger: the 20 releases" in plain(result.stderr)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_ledger_file_that_is_taken_away_stops_the_loop(tmp_path, how):
    path = tmp_path / "l"
    made = private("dp-sgd", engine_options={"ledger": path, "noise_seed": None})
    steps_of(*made, steps=3)
    copied = path.read_bytes()
    path.unlink()
    if how == "replaced":
        path.write_bytes(copied)
    with pytest.raises(PrivacyError, match=f"was {how} while a run charges it"):
        steps_of(*made, steps=1)
    assert made[0].released == 3
    # The model can be used elsewhere all the same.
    with pytest.raises(PrivacyError, match=how):
        made[0].detach()
    made[1](made[3].dataset[0][0][None]).sum().backward()
    assert (path.read_bytes() if how == "replaced" else copied) == copied
