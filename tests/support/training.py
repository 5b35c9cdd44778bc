"""Small training runs, and what they leave in their folders."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vestige.train.config import TrainConfig
from vestige.train.training import Progress

LINE = {"step", "epoch", "epsilon", "test_loss", "test_accuracy"}


RESULT: dict[str, type | tuple[type, ...]] = {
    "method": str,
    "settings": dict,
    "dataset": str,
    "model": str,
    "accuracy": float,
    "loss": float,
    "task": str,
    "metrics": dict,
    "measured_on": str,
    "epsilon": float,
    "delta": float,
    "target_epsilon": type(None),
    "accountant": str,
    "guarantee": str,
    "adjacency": str,
    "beta": float,
    "noise_multiplier": float,
    "sample_rate": float,
    "lot": int,
    "records": int,
    "steps": int,
    "epochs": float,
    "clip": float,
    "clipping": str,
    "optimizer": str,
    "lr": float,
    "parameters": int,
    "seed": int,
    "repeatable_noise": bool,
    "interrupted": bool,
    "max_epsilon": type(None),
    "budget_spent": bool,
    "lost_releases": int,
    "earlier_releases": int,
    "caveats": list,
    "device": str,
    "folder": str,
    "versions": dict,
}


def tiny(**changes: Any) -> TrainConfig:
    """A run of a few milliseconds: 40 records, 5 lots an epoch."""
    values: dict[str, Any] = {
        "model": "linear",
        "train_size": 40,
        "test_size": 20,
        "lot": 8,
        "steps": 7,
        "accountant": "rdp",
        "device": "cpu",
        "noise_multiplier": None if "epsilon" in changes else 1.0,
    }
    return TrainConfig(**values | changes)


def weights(result: dict[str, Any]) -> dict[str, torch.Tensor]:
    loaded = torch.load(Path(result["folder"]) / "model.pt", weights_only=True)
    assert isinstance(loaded, dict)
    return loaded


def read(result: dict[str, Any], name: str) -> Any:
    return json.loads((Path(result["folder"]) / name).read_text())


def lines(result: dict[str, Any]) -> list[dict[str, Any]]:
    text = (Path(result["folder"]) / "metrics.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def equal(first: dict[str, torch.Tensor], second: dict[str, torch.Tensor]) -> bool:
    return first.keys() == second.keys() and all(torch.equal(first[k], second[k]) for k in first)


def public_files(folder: Path) -> set[str]:
    """The names in a run folder, without the secrets."""
    return {f.name for f in folder.iterdir() if f.suffix != ".secret"}


def press_at(step: int, times: int = 1) -> Callable[[Progress], None]:
    """A callback that presses Ctrl-C when the lot of that number is done."""

    def press(progress: Progress) -> None:
        if progress.stage == "training" and progress.step == step and not progress.metrics:
            for _ in range(times):
                signal.raise_signal(signal.SIGINT)

    return press
