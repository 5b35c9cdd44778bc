"""From rows to the numbers of a report, as plain JSON types: nothing but the rows is looked at.

The same rows give the same numbers, to the last digit, wherever they are computed.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from types import MappingProxyType
from typing import Any

from vestige.lab.definition import Experiment
from vestige.lab.grid import COLUMNS, Row, fair_cells, seen, tasks_of
from vestige.lab.statistics import (
    PairedTest,
    corrected,
    equivalence,
    paired_test,
    summarise,
    time_to_target,
)

Numbers = dict[str, Any]
Levels = Mapping[str, Mapping[str, float]]  # accuracies by what reaches them, and by dataset
# What the rows of a line have in common, and what their machines may differ in.
_COMMON = "method settings lr noise_multiplier epsilon epsilon_marginal delta".split()
_MACHINE = ("processor", "device")


def fitted(experiment: Experiment, rows: Mapping[str, Row]) -> Experiment:
    """The experiment with as many seeds as all of its arms have, if these are more than it asks
    for: a command with --seeds needs no note of its own to be reported."""
    if experiment.kind != "training":
        return experiment
    asked = {"published": experiment.arms, "fair": experiment.fair}
    for column in (name for name in COLUMNS if asked[name]):
        more = _one_more_seed(experiment, column)
        while all(task.hash in rows for task in tasks_of(more, rows, (column,))):
            experiment, more = more, _one_more_seed(more, column)
    return experiment


def _one_more_seed(experiment: Experiment, column: str) -> Experiment:
    if column == "fair" and experiment.fair is not None:
        more = experiment.fair.model_copy(update={"seeds": experiment.fair.seeds + 1})
        return experiment.model_copy(update={"fair": more})
    return experiment.model_copy(update={"seeds": experiment.seeds + 1})


def rows_of(experiment: Experiment, rows: Mapping[str, Row]) -> list[Row]:
    """The finished rows of an experiment, named as it names them, in its own order.

    `cell` is the part of the experiment that a row belongs to: dataset, grid values or panel, and
    in the fair column the target epsilon.
    """
    places = ("column", "role", "label")
    return [
        row
        | {name: getattr(task, name) for name in places}
        | {"experiment": experiment.name, "cell": dict(task.cell)}
        for task in tasks_of(experiment, rows)
        if (row := seen(task, rows)) is not None
    ]


def begun(experiment: Experiment, rows: Mapping[str, Row]) -> bool:
    """Whether an experiment has a result, or a row that was made for it.

    Where it only shares tuning rows with another experiment, there is nothing to report.
    """
    made = (task for task in tasks_of(experiment, rows) if task.hash in rows)
    return any(
        task.role == "final" or rows[task.hash]["experiment"] == experiment.name for task in made
    )


def ceilings(without_privacy: Experiment, rows: Mapping[str, Row]) -> dict[str, float]:
    """What each dataset allows without privacy: the best rate's best epoch, on average over seeds.

    Both are chosen on the test images, so that the line is generous.
    """
    best: dict[str, float] = {}
    for cell in _published(without_privacy, rows_of(without_privacy, rows)):
        means = [line["best_accuracy"]["mean"] for line in cell["lines"] if line.get("count")]
        if means:
            best[cell["cell"]["dataset"]] = max(means)
    return best


def private_levels(tuned: Experiment, rows: Mapping[str, Row]) -> dict[str, float]:
    """What the first arm of a fair column ends at, at its largest epsilon, by dataset.

    A dataset whose final runs are not all there has none.
    """
    reached: dict[str, float] = {}
    for cell in _fair(tuned, rows_of(tuned, rows)):
        line = cell["lines"][0]
        if cell["cell"]["epsilon"] == largest_epsilon(tuned) and line["count"] == line["expected"]:
            reached[cell["cell"]["dataset"]] = line["accuracy"]["mean"]
    return reached


def largest_epsilon(experiment: Experiment) -> float:
    """The largest epsilon of the fair column."""
    assert experiment.fair is not None
    return max(experiment.fair.epsilons)


def summarised(
    experiment: Experiment, rows: Sequence[Row], levels: Levels = MappingProxyType({})
) -> Numbers:
    """All numbers of an experiment's report, from `rows_of` it.

    `levels` are accuracies of other models on the same images.
    """
    told = ("title", "paper", "item", "claim")
    head: Numbers = {name: getattr(experiment, name) for name in told} | {
        "experiment": experiment.name,
        "assumed": list(experiment.assumed),
        "smoke_run": experiment.quick,
    }
    if experiment.kind == "direction-error":
        return head | {"panels": _panels(experiment, rows)}
    return head | {
        "reference": experiment.reference,
        "published": _published(experiment, rows),
        "fair": _fair(experiment, rows),
        "levels": {label: dict(by) for label, by in levels.items()},
    }


def _published(experiment: Experiment, rows: Sequence[Row]) -> list[Numbers]:
    published = [row for row in rows if row["column"] == "published"]
    cells = []
    for dataset, variant in itertools.product(experiment.datasets, experiment.variants()):
        cell = {"dataset": dataset, **variant}
        lines: list[Numbers] = []
        for arm in experiment.arms:
            line = _line(matching(published, cell, arm.label), experiment.targets.get(dataset))
            head = {"label": arm.label, "expected": experiment.seeds}
            lines.append(head | line | {"paper": dict(arm.paper)})
        finished = [line for line in lines if line["count"]]
        base = [line for line in finished if line["label"] == experiment.reference]
        for line in finished if base and base[0]["seconds"]["mean"] else ():
            line["relative_seconds"] = line["seconds"]["mean"] / base[0]["seconds"]["mean"]
        lines += [absent.model_dump() for absent in experiment.absent]
        cells.append({"cell": cell, "lines": lines})
    _test(cells, published, experiment.reference)
    return cells


def _fair(experiment: Experiment, rows: Sequence[Row]) -> list[Numbers]:
    fair = experiment.fair
    if fair is None:
        return []
    finals = [row for row in rows if row["column"] == "fair" and row["role"] == "final"]
    tuning = [row for row in rows if row["role"] == "tuning"]
    cells: dict[tuple[str, float], Numbers] = {}
    for dataset, epsilon, arm in fair_cells(experiment):
        cell = {"dataset": dataset, "epsilon": epsilon}
        line = _line(matching(finals, cell, arm.label), experiment.targets.get(dataset))
        tuned = matching(tuning, cell, arm.label)
        tried: dict[str, list[float]] = {}
        for row in tuned:
            tried.setdefault(_candidate(row, arm.choices), []).append(row["final_accuracy"])
        tuning_means = {name: math.fsum(seeds) / len(seeds) for name, seeds in tried.items()}
        head = {"label": arm.label, "expected": fair.seeds}
        lines = cells.setdefault((dataset, epsilon), {"cell": cell, "lines": []})["lines"]
        lines.append(head | line | {"follows": arm.follows, "tuning": tuning_means})
    _test(list(cells.values()), finals, fair.arms[0].label, fair.margin)
    return list(cells.values())


def _candidate(row: Row, choices: Iterable[str]) -> str:
    """What a tuning row tried, in words: its rate, and the settings that were tuned beside it."""
    return " ".join([str(row["lr"]), *(f"{name} {row['settings'][name]}" for name in choices)])


def matching(rows: Iterable[Row], cell: Mapping[str, Any], label: str) -> list[Row]:
    """The rows of one method in one cell."""
    return [row for row in rows if row["cell"] == cell and row["label"] == label]


def _line(rows: Sequence[Row], target: float | None) -> Numbers:
    """The numbers of one method in one cell."""
    if not rows:
        return {"count": 0}
    first = rows[0]
    line: Numbers = {name: first[name] for name in _COMMON} | {
        "count": len(rows),
        "accuracy": asdict(summarise([row["final_accuracy"] for row in rows])),
        "best_accuracy": asdict(summarise([row["best_accuracy"] for row in rows])),
        "loss": mean_of_all([row["final_loss"] for row in rows]),
        "seconds": asdict(summarise([row["seconds"] for row in rows])),
        **{f"{name}s": sorted({row["hardware"][name] for row in rows}) for name in _MACHINE},
        "workers": sorted({row["hardware"]["workers"] for row in rows}),
    }
    if first["diagnostics"] is not None:
        line["memory"] = {
            name: mean_of_all([row["diagnostics"]["mean"][name] for row in rows])
            for name in first["diagnostics"]["mean"]
        }
    if target is not None:
        line["target"] = asdict(time_to_target(target, [row["curve"] for row in rows]))
    return line


def mean_of_all(values: Sequence[float | None]) -> float | None:
    """The mean; None where a value is missing."""
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _test(
    cells: list[Numbers], rows: Sequence[Row], reference: str, margin: float | None = None
) -> None:
    """Add a paired test of every method against the reference, corrected over all cells.

    A method that turns out to be the reference (the same runs) is neither tested nor counted. With
    a `margin` it is also tested whether the two are equal within it.
    """
    lines: list[Numbers] = []
    tests: list[PairedTest] = []
    for cell in cells:
        own = {line["label"]: matching(rows, cell["cell"], line["label"]) for line in cell["lines"]}
        base = {row["seed"]: row for row in own.get(reference, ())}
        for line in cell["lines"]:
            runs = {row["seed"]: row for row in own[line["label"]]}
            if line["label"] == reference or not runs or not base:
                continue
            if _numbers(runs.values()) == _numbers(base.values()):
                line["same_runs"] = reference
                continue
            pair = [
                {seed: row["final_accuracy"] for seed, row in some.items()} for some in (runs, base)
            ]
            test = paired_test(pair[0], pair[1])
            if test is not None:
                lines.append(line)
                tests.append(test)
            both = runs.keys() & base.keys()
            if margin is not None and len(both) > 1:
                apart = [pair[0][seed] - pair[1][seed] for seed in sorted(both)]
                line["equivalence"] = asdict(equivalence(apart, margin))
    for line, test in zip(lines, corrected(tests), strict=True):
        line["against_reference"] = asdict(test)


def _numbers(runs: Iterable[Row]) -> list[tuple[str, bool]]:
    """What tells the numbers of some runs from those of others."""
    return [(row["hash"], row.get("averaged", False)) for row in runs]


def _panels(experiment: Experiment, rows: Sequence[Row]) -> list[Numbers]:
    """The points of every sweep, in the order of its values."""
    panels = []
    for sweep in experiment.sweeps:
        own = {row["config"][sweep.varied]: row for row in rows if row["label"] == sweep.name}
        points = [
            {"value": value, **own[value]["errors"]} for value in sweep.values if value in own
        ]
        panels.append(
            {
                "panel": sweep.name,
                "varied": sweep.varied,
                "fixed": dict(sweep.fixed),
                "expected": len(sweep.values),
                "points": points,
            }
        )
    return panels
