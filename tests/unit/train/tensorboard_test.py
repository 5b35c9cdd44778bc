"""Scalars for TensorBoard: public numbers only."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

from tests.support.program import run
from vestige.train.tensorboard import Scalars, scalars
from vestige.train.training import Progress


def test_scalars_are_public_numbers_only() -> None:
    line = {
        "step": 4,
        "epoch": 1,
        "epsilon": 2.0,
        "test_loss": None,
        "test_accuracy": 0.5,
        "seconds": 1.0,
        "diagnostics": {
            "groups": ["a", "b"],
            "step": [0, 1],
            "rho": [[None, 2.0], [None, 4.0]],
            "depth": [[1.0, 1.0], [2.0, 2.0]],
            "weights": [[[1.0], [1.0]]],
        },
    }
    assert scalars(line) == {
        "held_out/accuracy": 0.5,
        "privacy/epsilon": 2.0,
        "rho/b": 3.0,
        "depth/a": 1.5,
        "depth/b": 1.5,
    }
    asked = scalars(line | {"train_loss_outside_guarantee": 0.3})
    assert asked.keys() - scalars(line).keys() == {"outside_the_guarantee/train_loss"}


def test_tensorboard_that_is_not_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    result = run("train --tensorboard --out", str(tmp_path / "run"))
    assert result.exit_code == 2 and not (tmp_path / "run").exists()
    assert "pip install 'vestige-dp[tensorboard]'" in result.stderr


class Writer:
    """What torch's SummaryWriter is used for."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, float, int]] = []
        self.closed = False

    def add_scalar(self, tag: str, value: float, step: int) -> None:
        self.seen.append((tag, value, step))

    def flush(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


def test_scalars_are_written_at_the_end_of_epochs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    writer = Writer()
    with Scalars() as listener:
        monkeypatch.setattr(listener, "_writer", writer)
        listener(Progress("training", 3, 10, 2))
        listener(Progress("training", 5, 10, 2, {"test_accuracy": 0.5}, tmp_path))
    assert writer.seen == [("held_out/accuracy", 0.5, 5)] and writer.closed


@pytest.mark.skipif(
    importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed"
)
def test_tensorboard_reads_what_was_written(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    place = tmp_path / "run"
    assert run("train --epochs 2 --tensorboard --json --out", str(place)).exit_code == 0
    events = EventAccumulator(str(place / "tensorboard")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "held_out/accuracy",
        "held_out/loss",
        "privacy/epsilon",
    }
    lines = [json.loads(line) for line in (place / "metrics.jsonl").read_text().splitlines()]
    assert {e.wall_time for e in events.Scalars("held_out/accuracy")} == {0.0}
    found = [(e.step, e.value) for e in events.Scalars("held_out/accuracy")]
    assert found == [(line["step"], pytest.approx(line["test_accuracy"])) for line in lines]
