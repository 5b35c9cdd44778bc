"""From experiments to runs: which rows there are, and which of them can be run by now.

The rows of the published column and those that tune the fair column are known at once. A final row
of the fair column is known when the tuning of its method is finished: its learning rate, and
its settings where the file gives choices, are those with the best accuracy on validation images.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vestige.lab.arms import Candidate, FairArm
from vestige.lab.definition import Experiment
from vestige.lab.readings import Reading
from vestige.lab.setting import Config, RunSetting, config_hash

COLUMNS = ("published", "fair")
Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """One row to be made, and its place in the experiment that asks for it."""

    experiment: str
    column: str
    role: str  # "final", or "tuning" on validation images
    label: str
    hash: str
    config: Config
    run: RunSetting | Reading | None  # None for a point of a direction study
    device: str = "cpu"
    cell: tuple[tuple[str, Any], ...] = ()  # dataset, grid values, target epsilon, panel
    averaged: bool = False  # whether it is the averaged weights that are looked at
    long: bool = False  # whether it has checkpoints

    @property
    def name(self) -> str:
        """For people: what is being run."""
        parts = [self.experiment, self.label, *(f"{k} {v}" for k, v in self.cell)]
        if self.run is not None:
            parts.append(f"seed {self.run.seed}")
        if self.role == "tuning" and self.run is not None:
            parts.append(f"tuning lr {self.run.lr:g}")
        return ", ".join(parts)


def seen(task: Task, rows: Mapping[str, Row]) -> Row | None:
    """The task's row where there is one, with the accuracy that the task asks for."""
    row = rows.get(task.hash)
    if row is None or not task.averaged:
        return row
    return row | {"final_accuracy": row["averaged_accuracy"], "averaged": True}


def tasks_of(
    experiment: Experiment, rows: Mapping[str, Row], columns: Sequence[str] = COLUMNS
) -> Iterator[Task]:
    """All rows of an experiment that are known by now, finished or not; tuning comes first."""
    if experiment.kind == "direction-error":
        yield from _points(experiment)
        return
    if "fair" in columns:
        for cell in fair_cells(experiment):
            yield from _tuning(experiment, *cell)
    if "published" in columns:
        yield from _published(experiment)
    if "fair" in columns:
        for cell in fair_cells(experiment):
            yield from _finals(experiment, *cell, rows)


def count_of(experiment: Experiment, columns: Sequence[str] = COLUMNS) -> dict[str, int]:
    """How many rows each part of an experiment has, whether known by now or not."""
    hashes: dict[str, set[str]] = {"published": set(), "tuning": set()}
    for task in tasks_of(experiment, {}, columns):
        hashes["tuning" if task.role == "tuning" else "published"].add(task.hash)
    counts = {name: len(known) for name, known in hashes.items()}
    seeds = experiment.fair.seeds if experiment.fair and "fair" in columns else 0
    return counts | {"fair": seeds * len(list(fair_cells(experiment)))}


def fair_cells(experiment: Experiment) -> Iterator[tuple[str, float, FairArm]]:
    """Every dataset, epsilon and method of the fair column."""
    fair = experiment.fair
    if fair is not None:
        yield from itertools.product(experiment.fair_datasets, fair.epsilons, fair.arms)


def chosen(
    experiment: Experiment, dataset: str, epsilon: float, arm: FairArm, rows: Mapping[str, Row]
) -> Candidate | None:
    """What has the best validation accuracy; None while tuning is unfinished.

    Ties go to the lower validation loss, then to the smaller rate. An arm that follows another has
    its rate, and settings of its own.
    """
    follower = bool(arm.follows)
    if follower and experiment.fair is not None:
        arm = next(other for other in experiment.fair.arms if other.label == arm.follows)
    found = [seen(task, rows) for task in _tuning(experiment, dataset, epsilon, arm)]
    known = [row for row in found if row is not None]
    if len(known) < len(found):
        return None
    candidates = arm.candidates()
    each = len(known) // len(candidates)  # seeds
    tried = []
    for number, candidate in enumerate(candidates):
        own = known[number * each : (number + 1) * each]
        accuracy = math.fsum(row["final_accuracy"] for row in own) / each
        losses = [math.inf if row["final_loss"] is None else row["final_loss"] for row in own]
        tried.append((-accuracy, math.fsum(losses) / each, candidate.rate, number))
    best = candidates[min(tried)[-1]]
    return best._replace(settings={}) if follower else best


def _published(experiment: Experiment) -> Iterator[Task]:
    for dataset in experiment.datasets:
        for variant in experiment.variants():
            for arm in experiment.arms:
                for seed in range(experiment.seeds):
                    run = experiment.run(arm, dataset, variant, seed)
                    place = (experiment.name, "published", "final", arm.label)
                    cell = {"dataset": dataset, **variant}
                    yield _task(experiment, place, run, cell, arm.averaged)


def _tuning(experiment: Experiment, dataset: str, epsilon: float, arm: FairArm) -> Iterator[Task]:
    assert experiment.fair is not None
    for candidate, seed in itertools.product(arm.candidates(), experiment.fair.tuned_with):
        run = experiment.fair_run(arm, dataset, epsilon, candidate, seed, tuning=True)
        place = (experiment.name, "fair", "tuning", arm.label)
        cell = {"dataset": dataset, "epsilon": epsilon}
        yield _task(experiment, place, run, cell, arm.averaged)


def _finals(
    experiment: Experiment, dataset: str, epsilon: float, arm: FairArm, rows: Mapping[str, Row]
) -> Iterator[Task]:
    assert experiment.fair is not None
    best = chosen(experiment, dataset, epsilon, arm, rows)
    for seed in experiment.fair.reported if best is not None else ():
        assert best is not None
        run = experiment.fair_run(arm, dataset, epsilon, best, seed, tuning=False)
        place = (experiment.name, "fair", "final", arm.label)
        cell = {"dataset": dataset, "epsilon": epsilon}
        yield _task(experiment, place, run, cell, arm.averaged)


def _points(experiment: Experiment) -> Iterator[Task]:
    for sweep in experiment.sweeps:
        for config in sweep.points():
            place = (experiment.name, "published", "final", sweep.name)
            cell = (("panel", sweep.name), (sweep.varied, config[sweep.varied]))
            yield Task(*place, config_hash(config), config, run=None, cell=cell)


def _task(
    experiment: Experiment,
    place: tuple[str, str, str, str],
    run: RunSetting | Reading,
    cell: Mapping[str, Any],
    averaged: bool,
) -> Task:
    config, where = run.config(), tuple(cell.items())
    seen_as = experiment.device, where, averaged, experiment.long
    return Task(*place, config_hash(config), config, run, *seen_as)


class Plan:
    """The rows of several experiments together, each of them once."""

    def __init__(self, experiments: Iterable[Experiment], columns: Sequence[str] = COLUMNS) -> None:
        self._experiments, self._columns = tuple(experiments), tuple(columns)
        self._cache: tuple[int, list[Task]] = (-1, [])

    def tasks(self, rows: Mapping[str, Row]) -> list[Task]:
        """What is known by now, in the order of the experiments: the first come first.

        Within an experiment tuning comes first, since the fair column waits for it.
        """
        if self._cache[0] != len(rows):  # rows are only ever added
            known: dict[str, Task] = {}
            for experiment in self._experiments:
                for task in tasks_of(experiment, rows, self._columns):
                    known.setdefault(task.hash, task)
            self._cache = (len(rows), list(known.values()))
        return self._cache[1]

    def total(self, rows: Mapping[str, Row]) -> int:
        """How many rows there are: those known by now, and those that wait for their tuning.

        Waiting rows may turn out to be shared, so this is at most too high until tuning is done.
        """
        waiting = sum(
            experiment.fair.seeds
            for experiment in self._experiments
            if experiment.fair is not None and "fair" in self._columns
            for cell in fair_cells(experiment)
            if chosen(experiment, *cell, rows) is None
        )
        return len(self.tasks(rows)) + waiting
