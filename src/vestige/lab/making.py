"""Making one row in a worker, and keeping it: claimed first, looked for again, stopped in time."""

from __future__ import annotations

import functools
import math
import shutil
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from vestige.errors import ConfigError, VestigeError
from vestige.lab.grid import Task
from vestige.lab.rows import RowStore

UNFINISHED = "unfinished"  # the run folders of long rows
Watch = Callable[[int, int], None]  # told the epochs of a row that are done, and how many it has


@dataclass(frozen=True)
class Made:
    """How the making of a row ended: well, by an error, or before it began."""

    elsewhere: bool = False  # another command is running it, or has finished it
    late: bool = False  # a long one is left to the next command, with its checkpoint
    error: str = ""
    details: str = ""  # where an unexpected error came from
    fatal: bool = False  # no row can be kept any more


class _LateError(Exception):
    """A long row would end after the deadline."""


def _in_time(deadline: float, watch: Watch | None) -> Watch:
    """`watch`, and _LateError before an epoch that would probably end after the deadline."""
    before = time.time()

    def told(epoch: int, epochs: int) -> None:
        nonlocal before
        if watch:
            watch(epoch, epochs)
        began, before = before, time.time()
        if epoch < epochs and before + (before - began) > deadline:
            raise _LateError

    return told


def make(
    task: Task,
    root: str,
    device: str | None,
    workers: int,
    watch: Watch | None,
    deadline: float = math.inf,
) -> Made:
    """Make a row in this process and keep it, unless another command is at it.

    A row is claimed by a lock before it is run, and looked for once more after it is claimed, so
    that it is run once, however many commands share a results folder.
    """
    from vestige.lab import training_row

    store = _store(root)
    home = Path(root) / UNFINISHED / task.hash if task.long else None
    watch = watch if home is None else _in_time(deadline, watch)
    with store.claim(task.hash) as mine:
        if not mine or task.hash in store.refresh():
            return Made(elsewhere=True)
        try:
            row = training_row.make_row(task, device, watch, workers, home)
        except _LateError:
            return Made(late=True)
        except VestigeError as error:
            return Made(error=str(error))  # raised on purpose: it speaks for itself
        except Exception as error:
            details = "".join(traceback.format_exception(error))
            return Made(error=f"{type(error).__name__}: {error}", details=details)
        try:
            store.append(row)
        except (OSError, ConfigError) as error:  # a full disk, or images of another file
            return Made(error=str(error), fatal=True)
        if home is not None:
            shutil.rmtree(home, ignore_errors=True)
            home.with_suffix(".seconds").unlink(missing_ok=True)
    return Made()


@functools.lru_cache(maxsize=1)
def _store(root: str) -> RowStore:
    return RowStore(Path(root))


forget_stores = _store.cache_clear
