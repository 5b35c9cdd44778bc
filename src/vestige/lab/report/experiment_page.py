"""The page of an experiment: guarantee, settings, plots, memory, tables, raw rows, commands."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from vestige.checks import round_up
from vestige.lab import rendering, wording
from vestige.lab.arms import Arm, FairArm
from vestige.lab.definition import Experiment
from vestige.lab.grid import count_of
from vestige.lab.plots import Plot
from vestige.lab.report import downloads
from vestige.lab.report.curves import MEASURES
from vestige.lab.summary import Numbers
from vestige.lab.tables import cells_of, comparisons, fair_tables, panel_tables
from vestige.methods import METHODS
from vestige.statement.table import Table

Row = Mapping[str, Any]
_NAMES = {
    "train_range": "training images",
    "test_range": "test images",
    "lr": "learning rate",
    "noise_multiplier": "noise multiplier sigma",
    "group_noise_multiplier": "noise multiplier of a group",
    "clip": "clipping norm C",
}
# What an arm may change, in the order in which it is told.
_TOLD = (
    *("lr", "model", "clip", "clipping", "noise_multiplier", "group_noise_multiplier", "lot"),
    *("momentum", "epochs"),
)


def experiment_page(
    experiment: Experiment,
    rows: Sequence[Row],
    numbers: Numbers,
    plots: Sequence[Plot],
    made_by: str,
) -> str:
    """The page as text; `made_by` is the command that makes it again."""
    study, fair = experiment.kind == "direction-error", experiment.fair
    title = partial(wording.cell, notes=experiment.notes)
    memory = _memory(rows)
    cells = numbers.get("fair", ())
    fair_run = any(line.get("count") for cell in cells for line in cell["lines"])
    parts = {
        "guarantee": "Guarantee",
        "settings": "Settings",
        "plots": "Plots",
        "memory": "Spectrum and memory" if memory else "",
        "tables": "Tables" if study else "",
        "published": "" if study else experiment.heading,
        "fair": "Fair" if fair else "",
        "rows": "Rows and commands",
    }
    return rendering.html(
        "experiment.html.j2",
        kind=f"Vestige report: experiment {experiment.name}",
        title=experiment.title,
        lead=experiment.origin,
        parts={anchor: title for anchor, title in parts.items() if title},
        experiment=experiment,
        numbers=numbers,
        finished=_finished(rows),
        expected=sum(count_of(experiment).values()),
        guarantee=None if study else _guarantee(rows, numbers, experiment),
        protocol=[] if study else _protocol(experiment),
        methods=_sweeps(experiment) if study else _methods(experiment.arms, "protocol"),
        fair_methods=fair and _methods(fair.arms, "learning rates"),
        plots=plots,
        memory=memory,
        panels=[(panel, panel_tables(panel)) for panel in numbers.get("panels", ())],
        published=cells_of(numbers.get("published", ()), experiment.tables, title),
        fair=cells_of(cells, fair_tables(experiment), title) if fair_run else [],
        comparisons=comparisons,
        files=downloads.rows_of(experiment.name, rows),
        origin=_origin(rows),
        made_by=made_by,
    )


def _finished(rows: Sequence[Row]) -> int:
    """How many rows are there. A control may share its rows with another arm of the fair column,
    which counts both."""
    return len(
        {
            (row["hash"], row["role"], row["label"] if row["column"] == "fair" else "")
            for row in rows
        }
    )


def _guarantee(rows: Sequence[Row], numbers: Numbers, experiment: Experiment) -> dict[str, Any]:
    """Formal epsilon of every method beside the papers' figure, with what limits it."""
    stated = dict.fromkeys(str(row.get("guarantee", "none")) for row in rows)
    adjacency = " / ".join(g.partition("-DP, ")[2] for g in stated if g != "none") or "none stated"
    used = dict.fromkeys(str(row["config"].get("accountant", "pld")) for row in rows)
    finite = [row["epsilon"] for row in rows if row["epsilon"] is not None]
    deltas = ", ".join(
        dict.fromkeys(f"{row['delta']:g}" for row in rows if row["delta"] is not None)
    )
    head = "No guarantee"
    if finite:
        ends = dict.fromkeys(round_up(end) for end in (min(finite), max(finite)))
        head = f"epsilon {' to '.join(ends)} at delta {deltas}"
    return {
        "finite": bool(finite),
        "head": head,
        "adjacency": adjacency,
        "accountant": ", ".join(used).upper(),
        "notes": _notes(rows, max(finite, default=None)),
        "tables": _epsilon_tables(numbers, experiment),
    }


def _notes(rows: Sequence[Row], largest: float | None) -> list[str]:
    notes = [
        "Each epsilon is that of one run. All runs of this page together cost more.",
        "The papers' figure is their RDP value at sigma/beta of one group alone. It is a "
        "diagnostic, not a guarantee: a reader of the model sees every group.",
    ]
    warning = wording.weak(largest)
    if warning is not None:
        notes.append(warning)
    infinite = {row["label"]: row["method"] for row in rows if row["epsilon"] is None}
    for label, name in infinite.items():
        method = METHODS.get(name)
        why = method.guarantee if method is not None and not method.private else "without noise"
        notes.append(f"No guarantee for {label}: its epsilon is infinite ({why}).")
    if any(row["config"].get("repeatable_noise") for row in rows):
        notes.append(
            "The runs are in test mode, on public benchmark data: their noise can be repeated by "
            "whoever knows the seed. The figures are those of the same runs with secret noise."
        )
    return notes


def _epsilon_tables(numbers: Numbers, experiment: Experiment) -> list[Table]:
    """Formal epsilon and the papers' figure of every method; cells that agree share a table."""
    groups: dict[str, tuple[list[str], list[list[str]]]] = {}
    for cell in numbers["published"]:
        lines = [
            [
                line["label"],
                round_up(line["epsilon"]),
                round_up(line["epsilon_marginal"], none=wording.NONE),
            ]
            for line in cell["lines"]
            if line.get("count")
        ]
        if lines:
            titles, _ = groups.setdefault(json.dumps(lines), ([], lines))
            titles.append(wording.cell(cell["cell"], experiment.notes))
    headings = ["method", "formal epsilon", "papers' figure (diagnostic)"]
    return [
        Table(
            headings,
            lines,
            experiment.heading
            if len(groups) == 1
            else f"{experiment.heading} ({'; '.join(titles)})",
        )
        for titles, lines in groups.values()
    ]


def _protocol(experiment: Experiment) -> list[tuple[str, str]]:
    values: dict[str, Any] = experiment.protocol.values | experiment.grid
    told: list[tuple[str, str]] = [
        ("data", ", ".join(wording.noted(name, experiment.notes) for name in experiment.datasets)),
        ("seeds", str(experiment.seeds)),
    ]
    for key, value in values.items():
        shown = wording.images(value) if key.endswith("_range") else wording.value(value)
        told.append((_NAMES.get(key, key), shown))
    return told + ([("reference", experiment.reference)] if experiment.reference else [])


def _sweeps(experiment: Experiment) -> Table:
    lines = [
        [s.name, s.varied, wording.value(s.values), wording.settings(s.fixed)]
        for s in experiment.sweeps
    ]
    return Table(["panel", "varied", "values", "fixed"], lines, "Sweeps", words=4)


def _methods(arms: Sequence[Arm] | Sequence[FairArm], last: str) -> Table:
    """The methods of a column with their settings; what they change, or how they are tuned."""
    lines = []
    for arm in arms:
        told = [f"{name} {wording.value(arm.values[name])}" for name in _TOLD if name in arm.values]
        if isinstance(arm, FairArm):
            told = [f"that of {arm.follows}" if arm.follows else wording.value(arm.rates)]
            told += [f"{name} {wording.value(few)}" for name, few in arm.choices.items()]
        settings = wording.settings(arm.settings)
        lines.append([arm.label, arm.method, settings, ", ".join(told) or "as above"])
    return Table(["method", "name", "settings", last], lines, "Methods", words=4)


def _memory(rows: Sequence[Row]) -> list[Table]:
    """What the groups were like at the end, method by method."""
    by_cell: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("diagnostics") and row["column"] == "published":
            title = f"{row['label']}, {wording.cell(row['cell'])}"
            by_cell.setdefault(title, []).append(row["diagnostics"])
    tables = []
    for title, facts in by_cell.items():
        names = [name for name in MEASURES if name in facts[0]]
        lines = [
            [group, *(wording.number(_last_mean(facts, name, i), ".4g") for name in names)]
            for i, group in enumerate(facts[0]["groups"])
        ]
        tables.append(Table(["group", *(MEASURES[name] for name in names)], lines, title))
    return tables


def _last_mean(facts: Sequence[Mapping[str, Any]], name: str, group: int) -> float | None:
    last = [one[name][-1] for one in facts if one.get(name)]
    values = [block[group] for block in last if group < len(block) and block[group] is not None]
    return sum(values) / len(values) if values else None


def _origin(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """The machines and versions that the rows were made with."""
    machines = dict.fromkeys(_machine(row.get("hardware", {})) for row in rows)
    versions = dict.fromkeys(wording.settings(row.get("versions", {})) for row in rows)
    return [("machine", name) for name in machines] + [("versions", name) for name in versions]


def _machine(hardware: Mapping[str, Any]) -> str:
    device = hardware.get("device", "cpu")
    where = hardware.get("processor", "unknown") if device == "cpu" else device
    workers = hardware.get("workers", 1)
    return f"{where}, {hardware.get('threads', '?')} thread(s), {workers} run(s) at a time"
