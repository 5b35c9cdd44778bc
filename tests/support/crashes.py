"""Kills runs with SIGKILL at random moments and resumes them, again and again.

`python -m tests.support.crashes FOLDER KILLS SEED METHOD...` prints one JSON line for each method.
Torch is imported once, and every attempt is a fork of a process that has never run a kernel, so
that an attempt takes milliseconds. Half of the kills come from a timer, half in the middle of a
write.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import dp_accounting  # noqa: F401 - what a run imports later is there before the first fork
import torch
import torch._dynamo

from tests.support.small_runs import SETTINGS
from vestige.privacy import accounting
from vestige.privacy.ledger_file import read
from vestige.train import training
from vestige.train.config import TrainConfig

STEPS, DELTA = 24, 1e-5


def config(method: str, folder: Path) -> TrainConfig:
    return TrainConfig(
        method=method,
        settings=SETTINGS.get(method, {}),
        noise_multiplier=1.0,
        model="mlp",
        train_size=60,
        test_size=20,
        lot=10,
        steps=STEPS,
        accountant="rdp",
        checkpoint_every=5,
        noise_seed=11,
        out=folder,
    )


def attempt(method: str, folder: Path, kill: tuple[str, float] | None) -> int:
    """Start or resume the run in a child; its exit status, -9 if it was killed."""
    child = os.fork()
    if child == 0:
        try:
            if kill:
                _arm(*kill)
            if (folder / "checkpoint.pt").exists() or (folder / "result.json").exists():
                training.resume(folder)
            else:
                training.train(config(method, folder))
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(3)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def _arm(how: str, when: float) -> None:
    """Die after so many seconds, or in the middle of write number `when`."""

    def die() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    if how == "time":
        timer = threading.Timer(when, die)
        timer.daemon = True
        timer.start()
        return
    write, left = os.write, [int(when)]

    def torn(file: int, content: bytes) -> int:
        left[0] -= 1
        if left[0] < 0:
            write(file, bytes(content)[: max(1, int(len(content) * (when % 1)))])
            die()
        return write(file, content)

    os.write = torn  # type: ignore[assignment]


def survive(method: str, folder: Path, kills: int, seed: int) -> dict[str, object]:
    """Kill runs `kills` times in all, and compare each that ends with a whole one."""
    chance = random.Random(f"{method} {seed}")
    whole = folder / f"{method}-whole"
    begun = time.perf_counter()
    assert attempt(method, whole, None) == 0
    seconds = time.perf_counter() - begun
    expected, spent = _weights(whole), _epsilon(whole)
    found: dict[str, object] = {"method": method, "kills": 0, "runs": 0, "torn": 0, "lost": 0}
    problems: list[str] = []
    killed, number = 0, 0
    while killed < kills or number == 0:
        number += 1
        place = folder / f"{method}-{number}"
        while True:
            kill = None
            if killed < kills:
                # A little more than a run takes: some attempts end before the kill.
                timed = chance.random() < 0.5
                kill = (
                    ("time", chance.uniform(0, 1.1 * seconds))
                    if timed
                    else ("write", chance.uniform(0, 45))
                )
            status = attempt(method, place, kill)
            if status == 0:
                break
            if status != -signal.SIGKILL:
                return found | {"problems": [*problems, f"exit {status} after {kill}"]}
            killed += 1
            problems += _check(place, found)
        if not all(torch.equal(a, b) for a, b in zip(expected, _weights(place), strict=True)):
            problems.append(f"run {number}: other weights")
        if _epsilon(place) < spent:
            problems.append(f"run {number}: epsilon below that of a whole run")
    return found | {"kills": killed, "runs": number, "problems": problems}


def _check(place: Path, found: dict[str, object]) -> list[str]:
    """What a kill has left: a ledger that covers all releases, and no half file."""
    ledger = place / "ledger.jsonl"
    problems = []
    if ledger.exists():
        content = read(ledger)  # raises if it is damaged
        found["torn"] = int(found["torn"]) + (content.length < ledger.stat().st_size)  # type: ignore[call-overload]
        if content.events and not (place / "checkpoint.pt").exists():
            problems.append("a charge before the first checkpoint")
    if not (place / "checkpoint.pt").exists() and not (place / "result.json").exists():
        shutil.rmtree(place, ignore_errors=True)  # killed before anything was drawn
    return problems


def _weights(folder: Path) -> list[torch.Tensor]:
    return list(torch.load(folder / "model.pt", weights_only=True).values())


def _epsilon(folder: Path) -> float:
    return accounting.epsilon(read(folder / "ledger.jsonl").events, DELTA, "rdp")


def main() -> None:
    folder, kills, seed, *methods = sys.argv[1:]
    for method in methods:
        print(json.dumps(survive(method, Path(folder), int(kills), int(seed))), flush=True)


if __name__ == "__main__":
    main()
