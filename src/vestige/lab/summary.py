"""From rows to the numbers of a report, as plain JSON types: nothing but the rows is looked at.

The same rows give the same numbers, to the last digit, wherever they are computed.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from vestige.lab.definition import Experiment
from vestige.lab.grid import COLUMNS, Row, fair_cells, tasks_of
from vestige.lab.statistics import PairedTest, corrected, paired_test, summarise, time_to_target

Numbers = dict[str, Any]


def fitted(experiment: Experiment, rows: Mapping[str, Row]) -> Experiment:
    """The experiment with as many seeds as all of its arms have, if these are more than it asks
    for: a command with --seeds needs no note of its own to be reported."""
    if experiment.kind != "training":
        return experiment
    for column in COLUMNS if experiment.fair else ("published",):
        while _all_there(more := _one_more_seed(experiment, column), rows, column):
            experiment = more
    return experiment


def _one_more_seed(experiment: Experiment, column: str) -> Experiment:
    if column == "fair" and experiment.fair is not None:
        fair = experiment.fair
        more = fair.model_copy(update={"seeds": fair.seeds + 1})
        return experiment.model_copy(update={"fair": more})
    return experiment.model_copy(update={"seeds": experiment.seeds + 1})


def _all_there(experiment: Experiment, rows: Mapping[str, Row], column: str) -> bool:
    return all(task.hash in rows for task in tasks_of(experiment, rows, (column,)))


def rows_of(experiment: Experiment, rows: Mapping[str, Row]) -> list[Row]:
    """The finished rows of an experiment, named as it names them, in its own order.

    `cell` is the part of the experiment that a row belongs to: dataset, grid values or panel, and
    in the fair column the target epsilon.
    """
    return [
        rows[task.hash]
        | {
            "experiment": experiment.name,
            "column": task.column,
            "role": task.role,
            "label": task.label,
            "cell": dict(task.cell),
        }
        for task in tasks_of(experiment, rows)
        if task.hash in rows
    ]


def summarised(experiment: Experiment, rows: Sequence[Row]) -> Numbers:
    """All numbers of an experiment's report, from `rows_of` it."""
    head: Numbers = {
        "experiment": experiment.name,
        "title": experiment.title,
        "paper": experiment.paper,
        "item": experiment.item,
        "claim": experiment.claim,
        "assumed": list(experiment.assumed),
        "smoke_run": experiment.quick,
    }
    if experiment.kind == "direction-error":
        return head | {"panels": _panels(experiment, rows)}
    return head | {
        "reference": experiment.reference,
        "published": _published(experiment, rows),
        "fair": _fair(experiment, rows),
    }


def _published(experiment: Experiment, rows: Sequence[Row]) -> list[Numbers]:
    published = [row for row in rows if row["column"] == "published"]
    cells = []
    for dataset in experiment.datasets:
        for variant in experiment.variants():
            cell = {"dataset": dataset, **variant}
            here = [row for row in published if row["cell"] == cell]
            lines = []
            for arm in experiment.arms:
                line = _line(_matching(here, cell, arm.label), experiment.targets.get(dataset))
                head = {"label": arm.label, "expected": experiment.seeds}
                lines.append(head | line | {"paper": dict(arm.paper)})
            _relate(lines, here, experiment.reference)
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
        line = _line(_matching(finals, cell, arm.label), experiment.targets.get(dataset))
        tried = {
            str(row["lr"]): row["final_accuracy"] for row in _matching(tuning, cell, arm.label)
        }
        head = {"label": arm.label, "expected": fair.seeds}
        lines = cells.setdefault((dataset, epsilon), {"cell": cell, "lines": []})["lines"]
        lines.append(head | line | {"follows": arm.follows, "tuning": tried})
    _test(list(cells.values()), finals, fair.arms[0].label)
    return list(cells.values())


def _matching(rows: Iterable[Row], cell: Mapping[str, Any], label: str) -> list[Row]:
    return [row for row in rows if row["cell"] == cell and row["label"] == label]


def _line(rows: Sequence[Row], target: float | None) -> Numbers:
    """The numbers of one method in one cell."""
    if not rows:
        return {"count": 0}
    first = rows[0]
    line: Numbers = {
        "count": len(rows),
        "method": first["method"],
        "settings": first["settings"],
        "lr": first["lr"],
        "accuracy": asdict(summarise([row["final_accuracy"] for row in rows])),
        "best_accuracy": asdict(summarise([row["best_accuracy"] for row in rows])),
        "loss": _mean([row["final_loss"] for row in rows]),
        "noise_multiplier": first["noise_multiplier"],
        "epsilon": first["epsilon"],
        "epsilon_marginal": first["epsilon_marginal"],
        "delta": first["delta"],
        "seconds": asdict(summarise([row["seconds"] for row in rows])),
        "workers": sorted({row["hardware"]["workers"] for row in rows}),
        "processors": sorted({row["hardware"]["processor"] for row in rows}),
        "devices": sorted({row["hardware"]["device"] for row in rows}),
    }
    if first["diagnostics"] is not None:
        line["memory"] = _memory(rows)
    if target is not None:
        line["target"] = asdict(time_to_target(target, [row["curve"] for row in rows]))
    return line


def _memory(rows: Sequence[Row]) -> Numbers:
    """Means over the seeds of the means over groups and steps."""
    names = rows[0]["diagnostics"]["mean"]
    return {name: _mean([row["diagnostics"]["mean"][name] for row in rows]) for name in names}


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known and len(known) == len(values) else None


def _relate(lines: list[Numbers], rows: Sequence[Row], reference: str) -> None:
    """Add every method's time relative to the reference's."""
    base = _mean([row["seconds"] for row in rows if row["label"] == reference])
    for line in lines:
        if base and line["count"]:
            line["relative_seconds"] = line["seconds"]["mean"] / base


def _test(cells: list[Numbers], rows: Sequence[Row], reference: str) -> None:
    """Add a paired test of every method against the reference, corrected over all cells."""
    lines: list[Numbers] = []
    tests: list[PairedTest] = []
    for cell in cells:
        base = _by_seed(_matching(rows, cell["cell"], reference))
        for line in cell["lines"]:
            if line["label"] == reference or not line.get("count"):
                continue
            test = paired_test(_by_seed(_matching(rows, cell["cell"], line["label"])), base)
            if test is not None:
                lines.append(line)
                tests.append(test)
    for line, test in zip(lines, corrected(tests), strict=True):
        line["against_reference"] = asdict(test)


def _by_seed(rows: Iterable[Row]) -> dict[int, float]:
    return {row["seed"]: row["final_accuracy"] for row in rows}


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
