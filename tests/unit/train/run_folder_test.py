"""The run folder: which files, when, and what stays after a failure or Ctrl-C."""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import (
    LINE,
    RESULT,
    equal,
    lines,
    press_at,
    public_files,
    read,
    tiny,
    weights,
)
from vestige import files
from vestige.engine import checkpoint
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import loop as session
from vestige.train import run_folder as runfolder
from vestige.train.training import Progress, prepare, resume, train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_run_folder_holds_these_files_with_these_fields() -> None:
    result = train(tiny())
    folder = Path(result["folder"])
    assert folder.parent == Path("runs")
    assert {f.name for f in folder.iterdir()} == {
        "config.json",
        "ledger.jsonl",
        "metrics.jsonl",
        "model.json",
        "model.pt",
        "result.json",
        "statement.json",
        "statement.md",
    }
    assert read(result, "result.json") == result
    assert {key: type(value) for key, value in result.items()} == RESULT
    assert [line["step"] for line in lines(result)] == [5, 7]
    assert [line["epoch"] for line in lines(result)] == [1, 2]
    assert all(set(line) == LINE for line in lines(result))
    assert lines(result)[-1]["test_accuracy"] == result["accuracy"]
    config = read(result, "config.json")
    assert config["planned_epsilon"] == result["epsilon"]
    assert (config["planned_steps"], config["lot"], config["noise_multiplier"]) == (7, 8, 1.0)
    assert "noise_seed" not in config


def test_config_is_written_before_the_first_lot() -> None:
    seen: list[list[str]] = []

    def watch(progress: Progress) -> None:
        if progress.stage == "training" and progress.step == 0:
            seen.append(sorted(f.name for f in Path("out").iterdir()))

    train(tiny(out=Path("out")), progress=watch)
    (names,) = seen
    assert names[0] == "checkpoint.pt"
    assert names[1].endswith(".secret")
    assert names[2:] == ["config.json", "ledger.jsonl"]


def test_runs_of_the_same_second_get_folders_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(runfolder.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Stopped:
            return cls(2030, 1, 2, 3, 4, 5)

    monkeypatch.setattr(runfolder, "datetime", Stopped)
    names = [Path(train(tiny(steps=1))["folder"]).name for _ in range(3)]
    first = "digits-linear-dp-sgd-20300102-030405"
    assert names == [first, f"{first}-2", f"{first}-3"]


def test_out_may_be_new_nested_or_empty(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "some" / "new"):
        assert train(tiny(out=out, steps=1))["folder"] == str(out)
        assert (out / "result.json").is_file()


def test_a_failure_before_the_first_release_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: PrivacyEngine, losses: torch.Tensor) -> None:
        raise RuntimeError("broken")

    (tmp_path / "empty").mkdir()
    monkeypatch.setattr(PrivacyEngine, "backward", broken)
    for out in (None, tmp_path / "a" / "b", tmp_path / "empty"):
        with pytest.raises(RuntimeError, match="broken"):
            train(tiny(out=out))
    assert list(tmp_path.rglob("*")) == [tmp_path / "empty"]


def test_a_failure_after_a_release_keeps_the_whole_files() -> None:
    def fail(progress: Progress) -> None:
        if progress.step == 6:
            raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        train(tiny(out=Path("out")), progress=fail)
    assert public_files(Path("out")) == {
        "config.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "checkpoint.pt",
    }


def test_a_full_disk_leaves_no_part_of_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    write_whole = files.write_whole

    def full(path: Path, content: bytes, mode: int | None = None) -> None:
        if path.name == "metrics.jsonl" and path.exists():  # the second epoch's
            monkeypatch.setattr(os, "fsync", no_space)
        write_whole(path, content, mode)

    def no_space(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(runfolder, "write_whole", full)
    with pytest.raises(OSError, match="No space left"):
        train(tiny(out=Path("out")))
    assert public_files(Path("out")) == {
        "config.json",
        "metrics.jsonl",
        "ledger.jsonl",
        "checkpoint.pt",
    }
    text = (Path("out") / "metrics.jsonl").read_text()
    assert [json.loads(line)["step"] for line in text.splitlines()] == [5]


def test_nothing_that_is_written_follows_the_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """How long a step takes follows the size of its lot, which is secret."""
    written = []
    for pace in (0.001, 977.13):
        clock = itertools.count()
        with monkeypatch.context() as patch:
            patch.setattr(session.time, "perf_counter", lambda c=clock, p=pace: next(c) * p)
            out = Path(f"run-{pace}")
            made = prepare(tiny(steps=12, noise_seed=3, checkpoint_every=1, out=out))
            runfolder.RunWriter(made).run(lambda _: None)
        assert made.seconds > pace  # it was measured all the same
        result = json.loads((out / "result.json").read_text())
        del result["folder"]
        names = ("metrics.jsonl", "config.json", "statement.json", "statement.md")
        written.append([result, *((out / name).read_text() for name in names)])
    assert written[0] == written[1]


def test_a_checkpoint_holds_no_time() -> None:
    train(tiny(steps=100, epsilon=2.0, out=Path("out")), progress=press_at(7))
    state, _ = checkpoint.read(Path("out/checkpoint.pt"))
    assert set(state["others"]) == {"config", "prepared", "ending", "lines", "noted"}


def test_ctrl_c_ends_after_the_lot_with_everything_written() -> None:
    result = train(tiny(steps=100, epsilon=2.0), progress=press_at(7))
    assert result["interrupted"] is True
    assert result["steps"] == 7
    assert read(result, "result.json") == result
    spent = accounting.epsilon([Event(0.2, result["noise_multiplier"], 7)], 1e-5, "rdp")
    assert lines(result)[-1]["epsilon"] == spent < 1.0
    # Whoever pressed it may have looked: the claim keeps all planned steps.
    assert result["epsilon"] == read(result, "config.json")["planned_epsilon"] <= 2.0
    assert any("7 of 100 planned releases were made" in caveat for caveat in result["caveats"])
    stated = read(result, "statement.json")
    assert stated["guarantee"]["epsilon"] == result["epsilon"]
    assert stated["guarantee"]["end"]["kind"] == "planned releases"
    assert [line["step"] for line in lines(result)] == [5, 7]
    assert weights(result).keys() == {"out.weight", "out.bias"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_ctrl_c_before_the_first_lot_leaves_a_run_that_resumes(accountant: str) -> None:
    settings = {"steps": 10, "epsilon": 2.0, "accountant": accountant, "noise_seed": 5}
    stopped = train(tiny(**settings), progress=press_at(0))
    assert (stopped["interrupted"], stopped["steps"], stopped["epsilon"]) == (True, 0, 0.0)
    stated = read(stopped, "statement.json")
    assert [group["epsilon"] for group in stated["unit"]["groups"]] == [0.0] * 4
    assert any("Nothing was released" in warning for warning in stated["warnings"])
    result = resume(stopped["folder"])
    assert (result["interrupted"], result["steps"]) == (False, 10)
    straight = train(tiny(**settings))
    assert equal(weights(result), weights(straight))
    assert result["epsilon"] == straight["epsilon"]


def test_a_second_ctrl_c_stops_at_once() -> None:
    with pytest.raises(KeyboardInterrupt):
        train(tiny(out=Path("out")), progress=press_at(3, times=2))
    assert public_files(Path("out")) == {"config.json", "ledger.jsonl", "checkpoint.pt"}
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_loading_writes_nothing(tmp_path: Path) -> None:
    def press(progress: Progress) -> None:
        if progress.stage == "accounting":
            signal.raise_signal(signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        train(tiny(), progress=press)
    assert not list(tmp_path.iterdir())
