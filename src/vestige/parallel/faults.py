"""When a message of all ranks fails: which of them is gone."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from vestige.errors import VestigeError

_PATIENCE = 5.0  # seconds until a process whose connection broke is seen to be gone


def gone(places: Sequence[tuple[str, int]]) -> str:
    """Which rank does not answer any more, as far as can be told from this machine.

    `places` has the machine and the process of every rank.
    """
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        dead = [
            f"rank {rank} (process {process} on {host})"
            for rank, (host, process) in enumerate(places)
            if host == socket.gethostname() and not is_alive(process)
        ]
        if dead:
            return f"{' and '.join(dead)} has ended."
        time.sleep(0.1)  # a connection breaks before the process is gone
    others = sorted({host for host, _ in places} - {socket.gethostname()})
    if others or not places:
        return f"a rank on {' or '.join(others) or 'this machine'} does not answer."
    return (
        "every rank still runs, but they wait for different messages, or one was too late for the "
        "timeout of the group: all must make the same calls in the same order."
    )


def is_alive(process: int) -> bool:
    """Whether a process of this machine runs: one that nobody has buried yet does not."""
    try:
        os.kill(process, 0)
        state = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except PermissionError:
        return True
    except ProcessLookupError:
        return False
    except OSError:
        return not Path("/proc/self").exists()  # a system without /proc
    return state != "Z"


def is_of_messages(error: RuntimeError) -> bool:
    """Whether an error comes from a message between ranks, and not from what a rank computed."""
    if isinstance(error, VestigeError):
        return False
    # gloo has no error of its own; it names its file.
    return isinstance(error, dist.DistError) or "gloo" in str(error)
