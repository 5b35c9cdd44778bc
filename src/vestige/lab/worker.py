"""A worker: takes rows that nobody else is running, one after the other, until none is left.

Any number of workers, of one command or of several, share a results folder: a row is claimed by a
lock before it is run, and looked for once more after it is claimed, so that it is run once. `python
-m vestige.lab.worker` is a worker of its own process; it reads its `Job` from its first
line of input and writes one JSON object per event. It gives up when its input ends, which is when
the process that started it ends, in whatever way.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from vestige.errors import VestigeError
from vestige.lab.definition import Experiment, read
from vestige.lab.grid import COLUMNS, Plan, Row, Task
from vestige.lab.rows import RowStore

_PAUSE = 0.3  # seconds between looks, while all that is left is being run by others
Tell = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Job:
    """What a worker needs to know."""

    files: tuple[str, ...]
    out: str
    quick: bool = False
    seeds: int | None = None
    columns: tuple[str, ...] = COLUMNS
    device: str | None = None
    workers: int = 1
    deadline: float | None = None  # no row is started that would probably end after it

    def experiments(self) -> list[Experiment]:
        """The experiments, as the job wants them."""
        found = [read(Path(file)) for file in self.files]
        return [adapted(experiment, self.quick, self.seeds) for experiment in found]

    def plan(self) -> Plan:
        """Their rows."""
        return Plan(self.experiments(), self.columns)

    def as_line(self) -> str:
        """For the other process."""
        return json.dumps(asdict(self))

    @classmethod
    def from_line(cls, line: str) -> Job:
        """What `as_line` wrote."""
        values = json.loads(line)
        for name in ("files", "columns"):
            values[name] = tuple(values[name])
        return cls(**values)


def adapted(experiment: Experiment, quick: bool, seeds: int | None) -> Experiment:
    """The experiment as a smoke run, or with another number of seeds."""
    return (experiment.quickened() if quick else experiment).with_seeds(seeds)


class GivenUp(Exception):  # noqa: N818 - nothing went wrong
    """The process that asked for the rows is gone."""


def work(
    plan: Plan,
    store: RowStore,
    make: Callable[[Task], Row],
    tell: Tell,
    deadline: float | None = None,
    check: Callable[[], None] = lambda: None,
) -> None:
    """Run rows until all are finished, failed, or would end after the deadline.

    A row that fails is told and left to the next command; the others go on. An OSError (a full
    disk) ends the work, and so does whatever `check` raises between rows.
    """
    failed: set[str] = set()
    slowest = 0.0
    while True:
        check()
        if deadline is not None and time.time() + slowest > deadline:
            tell({"event": "deadline"})
            return
        rows = store.refresh()
        open_ = [t for t in plan.tasks(rows) if t.hash not in rows and t.hash not in failed]
        if not open_:
            return
        started = time.time()
        if not _run_one(open_, store, make, tell, failed):
            time.sleep(_PAUSE)  # all that is left is being run by others
        slowest = max(slowest, time.time() - started)


def _run_one(
    tasks: Iterable[Task],
    store: RowStore,
    make: Callable[[Task], Row],
    tell: Tell,
    failed: set[str],
) -> bool:
    """Run the first task that nobody else is running; False where there is none."""
    for task in tasks:
        with store.claim(task.hash) as mine:
            # It may have been finished between the last look at the file and the claim.
            if not mine or task.hash in store.refresh():
                continue
            tell({"event": "started", "hash": task.hash, "name": task.name})
            try:
                row = make(task)
            except (GivenUp, KeyboardInterrupt):
                raise
            except Exception as error:
                failed.add(task.hash)
                tell({"event": "failed", "hash": task.hash, "name": task.name, **_told(error)})
                return True
            store.append(row)
            tell({"event": "finished", "hash": task.hash, "name": task.name})
            return True
    return False


def _told(error: Exception) -> dict[str, str]:
    """An error that was raised on purpose speaks for itself; of another one, say where."""
    if isinstance(error, VestigeError):
        return {"error": str(error)}
    details = "".join(traceback.format_exception(error))
    return {"error": f"{type(error).__name__}: {error}", "details": details}


def one_thread() -> None:
    """Rows run side by side, each on one core: more threads would only get in each other's way."""
    import torch

    torch.set_num_threads(1)


def main() -> None:
    """The process of a worker."""
    job = Job.from_line(sys.stdin.readline())

    def tell(event: dict[str, Any]) -> None:
        # In one write, so that the reader never sees a part of it.
        os.write(1, f"{json.dumps(event)}\n".encode())

    def check(*_: int) -> None:
        if select.select([sys.stdin], [], [], 0)[0]:
            raise GivenUp  # nothing more is ever written there: it has ended

    from vestige.lab.training_row import make_row

    one_thread()
    try:
        with RowStore(Path(job.out)) as store:
            work(
                job.plan(),
                store,
                lambda task: make_row(task, job.device, check, job.workers),
                tell,
                job.deadline,
                check,
            )
    except GivenUp:
        return
    except (VestigeError, OSError) as error:
        tell({"event": "broken", "error": str(error)})
        sys.exit(1)


if __name__ == "__main__":
    main()
