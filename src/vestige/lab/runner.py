"""`reproduce`: run what is missing of some experiments, with several workers, and say what is left.

Finished rows are never run again, whatever ends the command: a kill, a full disk, Ctrl-C, a
deadline. The same command continues.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.lab import catalogue
from vestige.lab.definition import Experiment
from vestige.lab.grid import Plan, chosen_columns
from vestige.lab.progress import Display
from vestige.lab.rows import Rows, RowStore
from vestige.lab.worker import Job, adapted, one_thread, work

RESULTS = Path("results")
QUICK_RESULTS = Path("runs") / "quick"
QUICK = "quick"
SMOKE = "this is a smoke run: its numbers only show that everything runs"
_LOOK = 1.0  # seconds between looks at what other commands have finished


@dataclass(frozen=True)
class Request:
    """What `vestige reproduce` is asked for."""

    experiments: tuple[Experiment, ...]
    out: Path | None = None
    quick: bool = False
    seeds: int | None = None
    workers: int = 1
    device: str | None = None
    column: str = "both"
    minutes: float | None = None

    def __post_init__(self) -> None:
        if not self.experiments:
            raise ConfigError("no experiment is named: give a name, or --list to see them.")
        if type(self.workers) is not int or self.workers < 1:
            raise ConfigError(f"workers {self.workers!r} must be a whole number of at least 1.")
        if self.minutes is not None and not self.minutes > 0:
            raise ConfigError(f"minutes {self.minutes!r} must be above 0.")
        chosen_columns(self.column)
        for experiment in self.experiments:
            experiment.with_seeds(self.seeds)

    @property
    def root(self) -> Path:
        """Where the rows go: smoke runs have a folder of their own."""
        if self.quick:
            return QUICK_RESULTS if self.out is None else self.out / QUICK
        return RESULTS if self.out is None else self.out

    @property
    def adapted(self) -> list[Experiment]:
        """The experiments as they are run."""
        return [adapted(e, self.quick, self.seeds) for e in self.experiments]

    def job(self) -> Job:
        """What the workers are told."""
        return Job(
            files=tuple(str(e.path.resolve()) for e in self.experiments),
            out=str(self.root.resolve()),
            quick=self.quick,
            seeds=self.seeds,
            columns=chosen_columns(self.column),
            device=self.device,
            workers=self.workers,
            deadline=None if self.minutes is None else time.time() + 60 * self.minutes,
        )

    def command(self) -> str:
        """The command that asks for this, for people to give again."""
        words = ["vestige reproduce", *(catalogue.called(e) for e in self.experiments)]
        words += ["--quick"] if self.quick else []
        words += [f"--seeds {self.seeds}"] if self.seeds is not None else []
        words += [f"--column {self.column}"] if self.column != "both" else []
        words += [f"--workers {self.workers}"] if self.workers > 1 else []
        words += [f"--out {self.out}"] if self.out is not None else []
        words += [f"--device {self.device}"] if self.device is not None else []
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
    job, plan = request.job(), Plan(request.adapted, chosen_columns(request.column))
    with RowStore(request.root) as store:  # refuses a folder that cannot be written, and repairs
        for complaint in store.complaints:
            display.say(complaint)
        rows = store.refresh()
        known = {task.hash for task in plan.tasks(rows)}
        outcome = Outcome(request.root, plan.total(rows), len(known & rows.keys()))
        display.begin(outcome.finished, outcome.total)
        try:
            if request.workers == 1:
                _alone(job, plan, store, outcome, display)
            elif not outcome.complete:
                _together(job, plan, outcome, display)
            _count(plan, store, outcome)
            display.show(outcome.finished, outcome.total)
        finally:
            display.end()
    return outcome


def _alone(job: Job, plan: Plan, store: RowStore, outcome: Outcome, display: Display) -> None:
    """One worker: this process."""
    from vestige.lab.training_row import make_row

    def tell(event: dict[str, Any]) -> None:
        _heard(event, outcome, display)
        _count(plan, store, outcome)
        display.show(outcome.finished, outcome.total)

    with _one_thread():
        try:
            work(
                plan,
                store,
                lambda task: make_row(task, job.device, display.watch, job.workers),
                tell,
                job.deadline,
            )
        except KeyboardInterrupt:
            outcome.interrupted = True
        except OSError as error:
            outcome.failures.append(str(error))
            display.say(str(error))


def _together(job: Job, plan: Plan, outcome: Outcome, display: Display) -> None:
    """Several workers, each a process; this one watches."""
    rows = Rows(Path(job.out))
    with _processes(job) as workers, selectors.DefaultSelector() as inbox:
        for worker in workers:
            assert worker.stdout is not None
            inbox.register(worker.stdout, selectors.EVENT_READ, _Letters(worker))
        try:
            while inbox.get_map():
                for key, _ in inbox.select(_LOOK):
                    for event in key.data.read():
                        _heard(event, outcome, display)
                    if key.data.ended:
                        inbox.unregister(key.fileobj)
                        _ended(key.data.worker, outcome, display)
                _count(plan, rows, outcome)
                display.show(outcome.finished, outcome.total)
        except KeyboardInterrupt:
            outcome.interrupted = True


class _Letters:
    """The events that a worker writes, line by line."""

    def __init__(self, worker: subprocess.Popen[bytes]) -> None:
        self.worker, self.ended = worker, False
        self._rest = b""

    def read(self) -> Iterator[dict[str, Any]]:
        """What has arrived."""
        assert self.worker.stdout is not None
        arrived = os.read(self.worker.stdout.fileno(), 2**16)
        self.ended = not arrived
        *lines, self._rest = (self._rest + arrived).split(b"\n")
        for line in lines:
            yield json.loads(line)


@contextlib.contextmanager
def _processes(job: Job) -> Iterator[list[subprocess.Popen[bytes]]]:
    environment = dict(os.environ)
    # Threads that spin while they wait would take the cores away from the other workers.
    environment |= {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    command = [sys.executable, "-m", "vestige.lab.worker"]
    workers: list[subprocess.Popen[bytes]] = []
    try:
        for _ in range(job.workers):
            worker = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                bufsize=0,
                # Ctrl-C on the terminal is for this process, which then ends the others.
                process_group=0,
            )
            workers.append(worker)
            assert worker.stdin is not None
            worker.stdin.write(f"{job.as_line()}\n".encode())
        yield workers
    finally:
        for worker in workers:
            worker.terminate()
        for worker in workers:
            worker.wait()
            for pipe in (worker.stdin, worker.stdout):
                if pipe is not None:
                    pipe.close()


def _ended(worker: subprocess.Popen[bytes], outcome: Outcome, display: Display) -> None:
    code = worker.wait()
    if code < 0:
        display.say(
            f"a worker was killed (signal {-code}); its row is free again and the others go on."
        )
        outcome.failures.append(f"a worker was killed (signal {-code})")


def _heard(event: dict[str, Any], outcome: Outcome, display: Display) -> None:
    kind = event["event"]
    if kind == "started":
        display.started(event["name"])
    elif kind == "finished":
        outcome.made += 1
        display.finished(event["name"])
    elif kind == "deadline":
        outcome.deadline = True
    else:
        message = event["error"]
        if kind == "failed":
            message = f"the row {event['name']} failed: {message}"
        if message not in outcome.failures:
            outcome.failures.append(message)
            display.say(message)
            details = event.get("details")
            if details and details not in outcome.details:
                outcome.details.append(details)
                display.say(details)


def _count(plan: Plan, rows: Rows, outcome: Outcome) -> None:
    found = rows.refresh()
    outcome.total = plan.total(found)
    outcome.finished = sum(task.hash in found for task in plan.tasks(found))


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    import torch

    before = torch.get_num_threads()
    one_thread()
    try:
        yield
    finally:
        torch.set_num_threads(before)


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
