"""One rank of `vestige ...` or of an example, forked by `ranks.py`, with torchrun's environment."""

from __future__ import annotations

import contextlib
import importlib
import io
import os
import socket
import sys

import torch

from tests.support.experiments import wait_for


def main(task, rank, world, folder):
    """Run `vestige WORDS`; or examples/TASK.py, what it prints lands in FOLDER/TASK.RANK.pt."""
    torch.set_num_threads(1)
    where = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(_port(rank, folder))}
    os.environ |= where | {name: str(rank) for name in ("RANK", "LOCAL_RANK")}
    os.environ["WORLD_SIZE"] = str(world)
    program, *words = task.split()
    if program == "vestige":
        _command(words)
    os.environ["EPOCHS"] = "2"
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        importlib.import_module(f"examples.{task}").main()
    torch.save({"printed": printed.getvalue()}, folder / f"{task}.{rank}.pt")
    os._exit(0)


def _command(words):
    """Ends the process as the program does."""
    from vestige.cli import main as command

    sys.argv = ["vestige", *words]
    try:
        command()
    except SystemExit as ended:
        os._exit(ended.code or 0)


def _port(rank, folder):
    """A free port that rank 0 finds and tells the others."""
    told, half = folder / "port", folder / "port.half"
    if rank == 0:
        with socket.create_server(("localhost", 0)) as free:
            half.write_text(str(free.getsockname()[1]))
        half.rename(told)
    wait_for(told.exists)
    return int(told.read_text())
