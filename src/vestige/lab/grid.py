"""From experiments to runs: which rows there are, and which of them can be run by now.

The rows of the published column and those that tune the fair column are known at once. A final row
of the fair column is known when the tuning of its method is finished: its learning rate is the one
with the best accuracy on the validation images.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vestige.errors import ConfigError
from vestige.lab.definition import Experiment, FairArm
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
    run: RunSetting | None  # None for a point of a direction study
    device: str = "cpu"
    cell: tuple[tuple[str, Any], ...] = ()  # dataset, grid values, target epsilon, panel

    @property
    def name(self) -> str:
        """For people: what is being run."""
        parts = [self.experiment, self.label, *(f"{k} {v}" for k, v in self.cell)]
        if self.run is not None:
            parts.append(f"seed {self.run.seed}")
        if self.role == "tuning" and self.run is not None:
            parts.append(f"tuning lr {self.run.lr:g}")
        return ", ".join(parts)


def chosen_columns(column: str) -> tuple[str, ...]:
    """The columns that "published", "fair" or "both" stand for."""
    if column == "both":
        return COLUMNS
    if column not in COLUMNS:
        raise ConfigError(f"column {column!r} is unknown: choose published, fair or both.")
    return (column,)


def tasks_of(
    experiment: Experiment, rows: Mapping[str, Row], columns: Sequence[str] = COLUMNS
) -> Iterator[Task]:
    """All rows of an experiment that are known by now, finished or not; tuning comes first."""
    if experiment.kind == "direction-error":
        yield from _points(experiment)
        return
    if "fair" in columns and experiment.fair is not None:
        yield from _tuning(experiment)
    if "published" in columns:
        yield from _published(experiment)
    if "fair" in columns and experiment.fair is not None:
        yield from _fair(experiment, rows)


def count_of(experiment: Experiment, columns: Sequence[str] = COLUMNS) -> dict[str, int]:
    """How many rows each part of an experiment has, whether known by now or not."""
    counts = {"published": 0, "tuning": 0, "fair": 0}
    if experiment.kind == "direction-error":
        return counts | {"published": len({t.hash for t in _points(experiment)})}
    if "published" in columns:
        counts["published"] = len({task.hash for task in _published(experiment)})
    if "fair" in columns and experiment.fair is not None:
        fair = experiment.fair
        counts["tuning"] = len({task.hash for task in _tuning(experiment)})
        counts["fair"] = (
            len(experiment.fair_datasets) * len(fair.epsilons) * len(fair.arms) * fair.seeds
        )
    return counts


def chosen_rate(
    experiment: Experiment,
    arm: FairArm,
    dataset: str,
    epsilon: float,
    rows: Mapping[str, Row],
) -> float | None:
    """The learning rate with the best validation accuracy; None while tuning is unfinished.

    Ties go to the lower validation loss, then to the smaller rate.
    """
    assert experiment.fair is not None
    if arm.follows:
        leader = next(other for other in experiment.fair.arms if other.label == arm.follows)
        return chosen_rate(experiment, leader, dataset, epsilon, rows)
    tried = []
    for task in _tuning_of(experiment, arm, dataset, epsilon):
        row = rows.get(task.hash)
        if row is None:
            return None
        loss = row["final_loss"]
        rate = float(row["lr"])
        tried.append((-row["final_accuracy"], math.inf if loss is None else loss, rate))
    return min(tried)[2]


def _published(experiment: Experiment) -> Iterator[Task]:
    for dataset in experiment.datasets:
        for variant in experiment.variants():
            for arm in experiment.arms:
                for seed in range(experiment.seeds):
                    run = experiment.run(arm, dataset, variant, seed)
                    cell = {"dataset": dataset, **variant}
                    yield _task(experiment, "published", "final", arm.label, run, cell)


def _tuning(experiment: Experiment) -> Iterator[Task]:
    assert experiment.fair is not None
    for dataset in experiment.fair_datasets:
        for epsilon in experiment.fair.epsilons:
            for arm in experiment.fair.arms:
                yield from _tuning_of(experiment, arm, dataset, epsilon)


def _tuning_of(
    experiment: Experiment, arm: FairArm, dataset: str, epsilon: float
) -> Iterator[Task]:
    assert experiment.fair is not None
    seed = experiment.fair.tuning_seed
    for rate in arm.rates:
        run = experiment.fair_run(arm, dataset, epsilon, rate, seed, tuning=True)
        cell = {"dataset": dataset, "epsilon": epsilon}
        yield _task(experiment, "fair", "tuning", arm.label, run, cell)


def _fair(experiment: Experiment, rows: Mapping[str, Row]) -> Iterator[Task]:
    assert experiment.fair is not None
    for dataset in experiment.fair_datasets:
        for epsilon in experiment.fair.epsilons:
            for arm in experiment.fair.arms:
                rate = chosen_rate(experiment, arm, dataset, epsilon, rows)
                if rate is None:
                    continue
                for seed in range(experiment.fair.seeds):
                    run = experiment.fair_run(arm, dataset, epsilon, rate, seed, tuning=False)
                    cell = {"dataset": dataset, "epsilon": epsilon}
                    yield _task(experiment, "fair", "final", arm.label, run, cell)


def _points(experiment: Experiment) -> Iterator[Task]:
    for sweep in experiment.sweeps:
        for config in sweep.points():
            yield Task(
                experiment=experiment.name,
                column="published",
                role="final",
                label=sweep.name,
                hash=config_hash(config),
                config=config,
                run=None,
                cell=(("panel", sweep.name), (sweep.varied, config[sweep.varied])),
            )


def _task(
    experiment: Experiment,
    column: str,
    role: str,
    label: str,
    run: RunSetting,
    cell: Mapping[str, Any],
) -> Task:
    config = run.config()
    return Task(
        experiment=experiment.name,
        column=column,
        role=role,
        label=label,
        hash=config_hash(config),
        config=config,
        run=run,
        device=experiment.device,
        cell=tuple(cell.items()),
    )


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
            found: dict[str, Task] = {}
            for experiment in self._experiments:
                for task in tasks_of(experiment, rows, self._columns):
                    found.setdefault(task.hash, task)
            self._cache = (len(rows), list(found.values()))
        return self._cache[1]

    def total(self, rows: Mapping[str, Row]) -> int:
        """How many rows there are: those known by now, and those that wait for their tuning.

        Waiting rows may turn out to be shared, so this is at most too high until tuning is done.
        """
        waiting = 0
        for experiment in self._experiments:
            fair = experiment.fair
            if "fair" not in self._columns or fair is None:
                continue
            for dataset in experiment.fair_datasets:
                for epsilon in fair.epsilons:
                    for arm in fair.arms:
                        if chosen_rate(experiment, arm, dataset, epsilon, rows) is None:
                            waiting += fair.seeds
        return len(self.tasks(rows)) + waiting
