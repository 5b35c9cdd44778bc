"""`reproduce`: run what is missing of some experiments, with several workers, and say what is left.

Finished rows are never run again, whatever ends the command: a kill, a full disk, Ctrl-C, a
deadline. The same command continues, and takes up a long row at its last epoch. Several workers are
a process pool (concurrent.futures); each of them appends its rows by itself, so that a row is kept
as soon as it is made.
"""

from __future__ import annotations

import contextlib
import functools
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import (
    FIRST_COMPLETED,
    BrokenExecutor,
    Executor,
    Future,
    ProcessPoolExecutor,
    wait,
)
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, SkipValidation, model_validator

from vestige.errors import ConfigError
from vestige.lab import catalogue
from vestige.lab.definition import Experiment
from vestige.lab.grid import COLUMNS, Plan, Task
from vestige.lab.making import Made, forget_stores, make
from vestige.lab.progress import Display
from vestige.lab.readings import Reading
from vestige.lab.rows import RowStore
from vestige.privacy.options import File, OneOf, Options

RESULTS = Path("results")
QUICK_RESULTS = Path("runs") / "quick"
QUICK = "quick"
SMOKE = "this is a smoke run: its numbers only show that everything runs"
STOPPING = "stopping; finished rows are kept, the tables are written next; Ctrl-C again stops now"
_LOOK = 1.0  # seconds between looks at what other commands have finished
_PAUSE = 0.3  # seconds between looks, while all that is left is being run by others


class RunOptions(Options):
    """How rows are made: the options of `vestige reproduce`."""

    quick: bool = Field(
        default=False, description="A smoke run: few epochs and seeds, kept in its own folder."
    )
    seeds: int | None = Field(
        default=None, description="Number of seeds. Default: the experiment's."
    )
    workers: int = Field(default=1, ge=1, description="Processes that share the rows.")
    out: File | None = Field(
        default=None,
        description="Folder with rows.jsonl. Default: results; smoke runs: runs/quick.",
    )
    device: str | None = Field(
        default=None,
        description="auto, cpu, cuda or cuda:N. Default: the experiment's, mostly cpu.",
    )
    column: Annotated[str, OneOf((*COLUMNS, "both"))] = Field(
        default="both", description="published, fair or both."
    )
    minutes: float | None = Field(
        default=None, gt=0, description="Start no row that would probably end later."
    )


class Request(RunOptions):
    """What `vestige reproduce` is asked for."""

    experiments: tuple[SkipValidation[Experiment], ...]  # they were checked when they were read

    @model_validator(mode="after")
    def _check_experiments(self) -> Request:
        if not self.experiments:
            raise ConfigError("no experiment is named: give a name, or --list to see them.")
        for experiment in self.experiments:
            experiment.with_seeds(self.seeds)
        return self

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns whose rows are made."""
        return COLUMNS if self.column == "both" else (self.column,)

    @property
    def root(self) -> Path:
        """Where the rows go: smoke runs have a folder of their own."""
        if self.quick:
            return QUICK_RESULTS if self.out is None else self.out / QUICK
        return RESULTS if self.out is None else self.out

    @property
    def adapted(self) -> list[Experiment]:
        """The experiments as they are run."""
        chosen = [e.quickened() if self.quick else e for e in self.experiments]
        return [experiment.with_seeds(self.seeds) for experiment in chosen]

    def command(self) -> str:
        """The command that asks for this, for people to give again."""
        words = ["vestige reproduce", *(catalogue.called(e) for e in self.experiments)]
        words += ["--quick"] if self.quick else []
        for name in ("seeds", "column", "workers", "out", "device"):
            value = getattr(self, name)
            if value != RunOptions.model_fields[name].default:
                words.append(f"--{name} {value}")
        return " ".join(words)


@dataclass
class Outcome:
    """How a command ended."""

    root: Path
    total: int = 0
    finished: int = 0
    made: int = 0  # by this command
    failures: list[str] = field(default_factory=list)
    details: list[str] = field(default_factory=list)  # of unexpected errors, each once
    interrupted: bool = False
    deadline: bool = False

    @property
    def complete(self) -> bool:
        """Whether every row is there."""
        return self.finished == self.total


def reproduce(request: Request, display: Display | None = None) -> Outcome:
    """Run the rows that are missing. Ctrl-C is no exception here: the outcome says so."""
    display = display or Display()
    store = RowStore(request.root)  # refuses a folder that cannot be written, and repairs
    for complaint in store.complaints:
        display.say(complaint)
    work = _Work(request, store, display)
    outcome = work.outcome
    display.begin(outcome.finished, outcome.total)
    try:
        work.run_side_by_side()
        for workers in range(request.workers, 0, -1):  # a pool that lost a worker goes on without
            with _pool(workers) if request.workers > 1 else _here() as pool:
                try:
                    if work.run(pool, workers):
                        break
                except KeyboardInterrupt:
                    display.say(STOPPING)  # before the workers are waited for
                    raise
    except KeyboardInterrupt:
        outcome.interrupted = True
    finally:
        work.count()
        display.end()
    return outcome


class _Work:
    """The rows of a request on their way: what is open, what is being run, what has failed."""

    def __init__(self, request: Request, store: RowStore, display: Display) -> None:
        self._request, self._store, self._display = request, store, display
        self._plan = Plan(request.adapted, request.columns)
        self._failed: set[str] = set()
        self._elsewhere: set[str] = set()  # what another command is running, by the last look
        self._running: dict[Future[Made], tuple[Task, float]] = {}
        self._slowest = 0.0
        minutes = request.minutes
        self._deadline = math.inf if minutes is None else time.time() + 60 * minutes
        self.outcome = Outcome(request.root)
        self.count()

    def count(self) -> None:
        """See what is finished by now, by this command or another one."""
        rows = self._store.refresh()
        self.outcome.total = self._plan.total(rows)
        self.outcome.finished = sum(task.hash in rows for task in self._plan.tasks(rows))

    def run_side_by_side(self) -> None:
        """On a GPU, readings that share data, lot and length run together, in one loop."""
        device = self._request.device or ""
        open_ = [task for task in self._open() if isinstance(task.run, Reading)]
        if not open_ or not device.startswith("cuda"):
            return
        from vestige.lab import training_row

        for group in training_row.groups(open_):
            watch = functools.partial(self._tell, f"{len(group)} runs side by side")
            for row in training_row.plain_rows(group, device, watch):
                self._store.append(row)
                self.outcome.made += 1
            self.count()

    def _tell(self, name: str, epoch: int, epochs: int) -> None:
        self._show(f"{name} (epoch {epoch}/{epochs})")

    def run(self, pool: Executor, workers: int) -> bool:
        """Run rows until all are finished, failed, or would end after the deadline.

        A row that fails is told and left to the next command; the others go on. False where the
        pool has lost a worker.
        """
        self._running.clear()
        while True:
            waiting, now = self._open(), time.time()
            if waiting and now + self._slowest > self._deadline:
                self.outcome.deadline = True
                waiting = [task for task in waiting if task.long and now < self._deadline]
            for task in waiting[: workers - len(self._running)]:
                self._show(task.name)
                self._running[pool.submit(self._make(task))] = (task, time.time())
            if self._running:
                done, _ = wait(self._running, _LOOK, FIRST_COMPLETED)
                well = {self._ended(future) for future in done}
                if False in well:
                    return False
            elif self._elsewhere and not self.outcome.deadline:
                time.sleep(_PAUSE)  # all that is left is being run by another command
                self._elsewhere.clear()
            else:
                return True
            self.count()
            self._show()

    def _show(self, now: str = "") -> None:
        self._display.show(self.outcome.finished, self.outcome.total, now)

    def _open(self) -> list[Task]:
        rows = self._store.refresh()
        taken = self._failed | self._elsewhere | {task.hash for task, _ in self._running.values()}
        return [t for t in self._plan.tasks(rows) if t.hash not in rows and t.hash not in taken]

    def _make(self, task: Task) -> Callable[[], Made]:
        watch = functools.partial(self._tell, task.name)
        request, root = self._request, str(self._request.root.resolve())
        told = watch if request.workers == 1 else None
        return functools.partial(
            make, task, root, request.device, request.workers, told, self._deadline
        )

    def _ended(self, future: Future[Made]) -> bool:
        """Tell how a row went; False where its worker, or another one, was killed."""
        task, began = self._running.pop(future)
        self._slowest = max(self._slowest, time.time() - began)
        try:
            made = future.result()
        except BrokenExecutor:
            self._fail("a worker was killed; its row is free again and the others go on.", "")
            return False
        if made.fatal:
            self._fail(made.error, made.details)
            self._failed |= {open_.hash for open_ in self._plan.tasks(self._store.refresh())}
        elif made.error:
            self._failed.add(task.hash)
            self._fail(f"the row {task.name} failed: {made.error}", made.details)
        elif made.elsewhere:
            self._elsewhere.add(task.hash)
        elif made.late:
            self.outcome.deadline, self._deadline = True, 0.0
        else:
            self.outcome.made += 1
            self._display.done(task.name)
        return True

    def _fail(self, message: str, details: str) -> None:
        if message not in self.outcome.failures:
            self.outcome.failures.append(message)
            self._display.say(message)
            if details and details not in self.outcome.details:
                self.outcome.details.append(details)
                self._display.say(details)


class _Here(Executor):
    """Runs what is submitted at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The finished future. Ctrl-C comes through."""
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


@contextlib.contextmanager
def _here() -> Iterator[Executor]:
    """One worker, this process, on one core as all workers are."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield _Here()
    finally:
        torch.set_num_threads(before)
        forget_stores()


@contextlib.contextmanager
def _pool(workers: int) -> Iterator[Executor]:
    """Several processes, each on one core. They end with this process, in whatever way it ends."""
    context = multiprocessing.get_context("spawn")
    reader, writer = context.Pipe(duplex=False)
    # Threads that spin while they wait would take the cores away from the other workers.
    quiet = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    before = {name: os.environ.get(name) for name in quiet}
    os.environ.update(quiet)
    pool = ProcessPoolExecutor(workers, context, _begin_worker, (reader,))
    try:
        yield pool
    finally:
        writer.close()  # ends the workers, in the middle of a row if need be
        pool.shutdown(cancel_futures=True)
        for name, value in before.items():
            os.environ.pop(name)
            os.environ.update({} if value is None else {name: value})


def _begin_worker(reader: Connection) -> None:
    """A new process of the pool: Ctrl-C is for the first process, which then ends the others."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)

    def watch() -> None:
        with contextlib.suppress(EOFError, OSError):
            reader.recv()  # nothing is ever sent: this returns when the other end is closed
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()


def what_next(request: Request, outcome: Outcome) -> list[str]:
    """Sentences for the end of a command: what is there, and how to go on."""
    said = [f"{outcome.finished} of {outcome.total} rows are in {outcome.root / 'rows.jsonl'}"]
    if request.quick:
        said.append(SMOKE)
    if not outcome.complete:
        why = (
            "interrupted"
            if outcome.interrupted
            else "out of time"
            if outcome.deadline
            else "not all rows could be made"
        )
        said.append(f"{why}; finished rows are kept: continue with `{request.command()}`")
    return said
