"""`vestige train` and `vestige resume` under torchrun: rank 0 writes one folder.

Standalone: two of them beside each other would want the same port otherwise. Where torchrun itself
is of no matter, ranks are forked in its environment, since three starts of torch take longer than
what they do.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.support.cut_runs import STEPS, config, weights
from tests.support.experiments import wait_for
from tests.support.program import run_json
from tests.support.ranks import finish, start
from tests.support.training import press_at
from vestige.privacy import accounting, ledger_file
from vestige.train import training

TRAIN = ["train", "--dataset", "digits", "--epochs", "2", "--noise-seed", "5", "--method", "fo"]


def command(world, *words, restarts=0):
    start = [sys.executable]
    if world:
        start += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world)]
        start += ["--max-restarts", str(restarts)]
    return [*start, "-m", "vestige", *words]


def vestige(folder, world, *words, restarts=0):
    known = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        command(world, *words, restarts=restarts),
        env=known,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def done(process):
    said, errors = process.communicate(timeout=600)
    assert process.returncode == 0, errors
    return said


def forked(folder, words):
    """Two ranks of `vestige WORDS`, which both end well."""
    finish(start(f"vestige {words}", 2, folder, "torchrun_program"), folder)


@pytest.fixture
def alone(tmp_path, empty_folder):
    run_json(*TRAIN, "--out", "alone")
    return torch.load(tmp_path / "alone" / "model.pt")


def test_two_ranks_write_one_folder_with_the_weights_of_one_process(tmp_path, alone):
    said = json.loads(done(vestige(tmp_path, 2, *TRAIN, "--out", "run", "--json")))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["alone", "run"]
    assert {p.name for p in (tmp_path / "run").iterdir()} == {
        p.name for p in (tmp_path / "alone").iterdir()
    }
    weights = torch.load(tmp_path / "run" / "model.pt")
    for name, value in alone.items():
        assert torch.allclose(weights[name], value, rtol=1e-4, atol=1e-6), name
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert said["epsilon"] == result["epsilon"] and not result["interrupted"]


def test_a_run_of_two_ranks_is_interrupted_and_goes_on_alone(tmp_path, alone):
    process = vestige(tmp_path, 2, *TRAIN, "--out", "run", "--checkpoint-every", "1")
    wait_for((tmp_path / "run" / "checkpoint.pt").exists)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=600)
    done(vestige(tmp_path, 0, "resume", "run"))
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == json.loads((tmp_path / "alone/result.json").read_text())["steps"]
    weights = torch.load(tmp_path / "run" / "model.pt")
    for name, value in alone.items():
        assert torch.allclose(weights[name], value, rtol=1e-4, atol=1e-6), name


def test_a_run_that_one_process_began_goes_on_with_two_ranks(tmp_path):
    training.train(config(tmp_path / "straight", method="fo"))
    cut = training.train(config(tmp_path / "run", method="fo"), progress=press_at(7))
    assert cut["interrupted"] and cut["steps"] == 7
    forked(tmp_path, "resume run")
    expected, result = (
        json.loads((tmp_path / name / "result.json").read_text()) for name in ("straight", "run")
    )
    assert result["steps"] == expected["steps"] == STEPS
    assert torch.allclose(
        weights(tmp_path / "run"), weights(tmp_path / "straight"), rtol=1e-4, atol=1e-6
    )


def test_the_held_out_records_are_charged_once_for_all_ranks(tmp_path):
    """On a ledger that several runs share, and that every rank is given."""
    short = "train --dataset digits --model linear --steps 2 --lot 64"
    shared = "--ledger shared.jsonl --evaluate-epsilon 1"
    for number in (1, 2):
        forked(tmp_path, f"{short} {shared} --out run{number}")
        events = ledger_file.read(tmp_path / "shared.held-out.jsonl").events
        assert sum(event.count for event in events) == number
        told = json.loads((tmp_path / f"run{number}" / "result.json").read_text())
        spent = accounting.epsilon(events, 1e-5)
        assert told["held_out_release"]["epsilon_of_ledger"] == pytest.approx(spent)


def children(process):
    every = Path(f"/proc/{process}/task").glob("*/children")
    return [int(one) for path in every for one in path.read_text().split()]


def test_a_killed_rank_is_started_again_and_the_run_goes_on(tmp_path):
    process = vestige(tmp_path, 2, *TRAIN, "--out", "run", "--checkpoint-every", "1", restarts=1)
    until = time.time() + 60
    while not (tmp_path / "run" / "metrics.jsonl").exists() and time.time() < until:
        time.sleep(0.05)
    os.kill(max(children(process.pid)), signal.SIGKILL)
    done(process)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 46 and not result["interrupted"]
