"""Start the ranks of `rank_program`, or of another one, and gather what they bring."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parents[2]


def start(task, world, folder, program="rank_program"):
    """The processes of a task, world 0 for one without a group."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    paths = [str(ROOT / "src"), str(ROOT), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    command = [sys.executable, "-m", f"tests.support.{program}", task]
    return [
        subprocess.Popen(
            [*command, str(rank), str(world), str(folder)],
            env=environment,
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(max(1, world))
    ]


def together(task, world, folder, limit=150, program="rank_program"):
    """What every rank brings of every task, which may be several, with commas."""
    folder.mkdir(parents=True, exist_ok=True)
    processes = start(task, world, folder, program)
    errors = [process.communicate(timeout=limit)[1] for process in processes]
    assert all(process.returncode == 0 for process in processes), "\n".join(errors)
    brought = [
        {one: torch.load(folder / f"{one}.{rank}.pt") for one in task.split(",")}
        for rank in range(len(processes))
    ]
    return brought if "," in task else [one[task] for one in brought]
