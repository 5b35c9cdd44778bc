"""Small private searches, and what one has left behind."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from vestige.privacy.selection import Law
from vestige.train.config import TrainConfig
from vestige.train.tune import Search, trial
from vestige.train.tune.trial import Outcome

BASE = {"model": "linear", "lot": 40, "steps": 2, "train_size": 120, "test_size": 60}
RATES = ({"lr": 0.1}, {"lr": 0.5}, {"lr": 2.0})
LINE = (
    "tune --model linear --lot 40 --steps 2 --train-size 120 --test-size 60 --device cpu "
    "--try lr=0.1,0.5,2"
)


def search(**options: Any) -> Search:
    """A search of a few milliseconds a trial; names of `Search` go there, others to its runs."""
    own = {
        name: options.pop(name)
        for name in ("trials", "eta", "public_held_out", "out")
        if name in options
    }
    rows = options.pop("rows", RATES)
    noise = {} if "epsilon" in options else {"noise_multiplier": 1.0}
    base = TrainConfig(**BASE | noise | {"device": "cpu"} | options)
    return Search(rows, base, **own)


def number_of_trials(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the law come out as this number."""
    monkeypatch.setattr(Law, "draw", lambda *_: number)


def wins(monkeypatch: pytest.MonkeyPatch, place: int) -> list[int]:
    """Have real trials, of which this one scores most; those that were run."""
    real, seen = trial.run, []

    def run(setup: Any, seed: Any, stop: Callable[[], bool]) -> Outcome | None:
        outcome = real(setup, seed, stop)
        assert outcome is not None
        seen.append(len(seen))
        return outcome if seen[-1] == place else replace(outcome, score=-0.5)

    monkeypatch.setattr(trial, "run", run)
    return seen


def shape(text: str) -> Any:
    """JSON with every number as 0."""
    return json.loads(text, parse_float=lambda _: 0, parse_int=lambda _: 0)


def left_in(folder: Path) -> dict[str, str]:
    """Every file below a folder as text, with random names and times taken out of it."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            text = path.read_bytes().decode("latin-1")
            if path.suffix in (".json", ".jsonl", ".md", ".html"):
                text = re.sub(r"(?<![.\w])[0-9a-f]{16,}", "*", text)
            found[str(path.relative_to(folder))] = text
    return found


def times_in(folder: Path) -> set[int]:
    """The times of a folder and of its files."""
    return {path.stat().st_mtime_ns for path in (folder, *folder.rglob("*"))}


def content(folder: Path, name: str = "result.json") -> dict[str, Any]:
    found = json.loads((folder / name).read_text())
    assert isinstance(found, dict)
    return found
