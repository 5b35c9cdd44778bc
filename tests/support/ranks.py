"""Fork the ranks of `rank_program`, or of another one, and gather what they bring.

Torch is imported once, by a server that never runs a kernel; every rank is a fork of it.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import time

import torch

PROGRAMS = ["tests.support.rank_program", "tests.support.fsdp_program"]
# What a run imports when it needs it.
LATER = ["torch._dynamo", "dp_accounting", "vestige.cli.app", "sklearn.datasets"]
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload([*PROGRAMS, *LATER])
LIMIT = 600  # for machines that are slow and loaded; no rank comes near it otherwise


def start(task, world, folder, program="rank_program"):
    """The processes of a task, world 0 for one without a group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in (f"meeting.{world}", "port"):
        (folder / name).unlink(missing_ok=True)
    ranks = [
        FORKS.Process(target=_enter, args=(program, task, rank, world, folder), daemon=True)
        for rank in range(max(1, world))
    ]
    for rank in ranks:
        rank.start()
    return ranks


def _enter(program, task, rank, world, folder):
    os.chdir(folder)
    with (folder / f"errors.{rank}").open("w") as errors:
        os.dup2(errors.fileno(), 2)
    importlib.import_module(f"tests.support.{program}").main(task, rank, world, folder)


def finish(ranks, folder, limit=LIMIT):
    """Wait for all of them; what went wrong otherwise, and no rank is left behind."""
    until = time.monotonic() + limit
    try:
        for rank in ranks:
            rank.join(max(0.0, until - time.monotonic()))
        codes = [rank.exitcode for rank in ranks]
        errors = [(folder / f"errors.{rank}").read_text() for rank in range(len(ranks))]
        assert not any(codes) and None not in codes, "\n".join([str(codes), *errors])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def together(task, world, folder, program="rank_program"):
    """What every rank brings of every task, which may be several, with commas."""
    ranks = start(task, world, folder, program)
    finish(ranks, folder)
    brought = [
        {one: torch.load(folder / f"{one}.{rank}.pt") for one in task.split(",")}
        for rank in range(len(ranks))
    ]
    return brought if "," in task else [one[task] for one in brought]
