"""The tables of a report, from its numbers: the same for Markdown and for the page."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from vestige.checks import round_up
from vestige.lab import rendering, wording
from vestige.lab.definition import Experiment
from vestige.lab.summary import Numbers
from vestige.statement.table import Table

MARGINAL = "the paper's epsilon"
MEASURES = ("direction_mse", "gradient_mse", "cosine")
Show = Callable[[Numbers], str]
Columns = Mapping[str, Show]
Title = Callable[[Mapping[str, Any]], str]


@dataclass(frozen=True)
class Cell:
    """The tables of one part of an experiment: of a dataset, with the values of its grid.

    `absent` are the methods that are not run, with the reason; `tried` are the validation
    accuracies of each method by its learning rate, in words.
    """

    tables: Sequence[Table]
    absent: Sequence[tuple[str, str]] = ()
    tried: Sequence[tuple[str, str]] = ()


def cells_of(
    column: Sequence[Numbers], tables: Sequence[str], title: Title, arrow: str = ": "
) -> list[Cell]:
    """The `tables` of a column of the report, cell by cell."""
    cells = []
    for cell in column:
        lines, caption = cell["lines"], title(cell["cell"])
        absent = [(line["label"], line["reason"]) for line in lines if "reason" in line]
        tried = [
            (line["label"], ", ".join(f"{lr}{arrow}{best:.4f}" for lr, best in rates.items()))
            for line in lines
            if (rates := line.get("tuning"))
        ]
        aimed = any("target" in line for line in lines)
        made = [
            _table(_COLUMNS[name], lines, f"{caption}{_SUBTITLES.get(name, '')}")
            for name in tables
            if name != "targets" or aimed
        ]
        cells.append(Cell(made, absent, tried))
    return cells


def fair_tables(experiment: Experiment) -> list[str]:
    """The table of the fair column: with a margin, that of equivalence."""
    return ["equal" if experiment.fair and experiment.fair.margin else "fair"]


def comparisons(cells: Sequence[Numbers]) -> int:
    """How many tests Holm's correction is for; 0 where there is none."""
    tests = (line.get("against_reference") for cell in cells for line in cell["lines"])
    return next((int(test["comparisons"]) for test in tests if test), 0)


def panel_tables(panel: Numbers) -> list[Table]:
    """The points of one sweep of a direction study: a table for each measure."""
    points = panel["points"]
    names = [name for name in (points or [{}])[0] if name != "value"]
    tables = []
    for measure in MEASURES:
        methods = [name.removesuffix(f"_{measure}") for name in names if name.endswith(measure)]
        lines = [
            [f"{point['value']:g}", *(f"{point[f'{m}_{measure}']:.4g}" for m in methods)]
            for point in points
        ]
        tables.append(Table([panel["varied"], *methods], lines, measure.replace("_", " "), words=0))
    return tables


def markdown(experiment: Experiment, numbers: Numbers, command: str, rows: str) -> str:
    """The report of an experiment as a Markdown page; `command` is what made it."""
    title = partial(wording.plain_cell, notes=experiment.notes)
    return rendering.markdown(
        "table.md.j2",
        experiment=experiment,
        numbers=numbers,
        published=cells_of(numbers.get("published", ()), experiment.tables, title),
        fair=cells_of(numbers.get("fair", ()), fair_tables(experiment), title, " -> "),
        panels=[(panel, panel_tables(panel)) for panel in numbers.get("panels", ())],
        comparisons=comparisons,
        marginal=MARGINAL,
        command=command,
        rows=rows,
    )


def _table(columns: Columns, lines: Sequence[Numbers], caption: str) -> Table:
    body = [[show(line) for show in columns.values()] for line in lines]
    return Table(list(columns), body, caption)


def _number(name: str, form: str, table: str | None = None) -> Show:
    """A number of the line, or of a table in it."""

    def show(line: Numbers) -> str:
        values = line if table is None else line.get(table) or {}
        return wording.number(values.get(name), form)

    return show


def _spread(name: str, places: int = 4) -> Show:
    def show(line: Numbers) -> str:
        values = line.get(name)
        if values is None:
            return wording.NONE
        std = "" if values["std"] is None else f" ± {values['std']:.{places}f}"
        return f"{values['mean']:.{places}f}{std}"

    return show


def _epsilon(name: str, none: str) -> Show:
    def show(line: Numbers) -> str:
        if not line.get("count"):
            return wording.NONE
        return none if line[name] is None else round_up(line[name])

    return show


def _interval(values: Mapping[str, Any] | None) -> str:
    if values is None or values.get("low") is None or values.get("high") is None:
        return wording.NONE
    return f"[{values['low']:.4f}, {values['high']:.4f}]"


def _paper(line: Numbers) -> str:
    paper = line["paper"]
    if "accuracy" not in paper:
        return wording.NONE
    std = f" ± {paper['std']:.4f}" if "std" in paper else ""
    interval = f" {_interval(paper)}" if "low" in paper and "high" in paper else ""
    return f"{paper['accuracy']:.4f}{std}{interval}"


def _seeds(line: Numbers) -> str:
    count, expected = line.get("count", 0), line.get("expected")
    if expected is None:
        return wording.NONE
    return str(count) if count >= expected else f"{count}/{expected}"


def _difference(line: Numbers) -> str:
    if "same_runs" in line:
        return "the same runs"
    return wording.number((line.get("against_reference") or {}).get("difference"), "+.4f")


def _equivalent(line: Numbers) -> str:
    test = line.get("equivalence")
    if test is None:
        return wording.NONE
    within = "within" if test["p"] <= 0.05 else "not shown to be within"
    return f"{within} ±{test['margin']:g} (p {test['p']:.2g})"


def _reached(line: Numbers) -> str:
    target = line.get("target")
    return wording.NONE if target is None else f"{target['reached']}/{target['count']}"


_LABEL: Columns = {"method": lambda line: line["label"]}
_TESTS: Columns = {
    "difference": _difference,
    "95 % interval of the difference": lambda line: _interval(line.get("against_reference")),
    "p": _number("p", ".3g", "against_reference"),
    "p (Holm)": _number("p_holm", ".3g", "against_reference"),
    "detectable": _number("detectable", ".4f", "against_reference"),
}
_ACCURACY: Columns = {
    **_LABEL,
    "lr": _number("lr", "g"),
    "seeds": _seeds,
    "final accuracy": _spread("accuracy"),
    "95 % interval": lambda line: _interval(line.get("accuracy")),
    "best accuracy": _spread("best_accuracy"),
    "epsilon": _epsilon("epsilon", "no guarantee"),
}
_FAIR: Columns = {**_ACCURACY, "sigma": _number("noise_multiplier", ".4f"), **_TESTS}
_COLUMNS: Mapping[str, Columns] = {
    "accuracy": {
        **_ACCURACY,
        MARGINAL: _epsilon("epsilon_marginal", wording.NONE),
        **_TESTS,
        "paper": _paper,
    },
    "runtime": {
        **_LABEL,
        "seeds": _seeds,
        "seconds": _spread("seconds", 1),
        "relative": _number("relative_seconds", ".2f"),
        "paper, seconds": _number("seconds", "g", "paper"),
        "paper, relative": _number("relative", ".2f", "paper"),
    },
    "memory": {
        **_LABEL,
        "seeds": _seeds,
        "mean depth": _number("depth", ".4f", "memory"),
        "mean memory ratio": _number("memory_ratio", ".4f", "memory"),
        "mean exponent": _number("rho", ".3f", "memory"),
        "mean tempering": _number("tempering", ".4f", "memory"),
        "paper, depth": _number("depth", ".4f", "paper"),
        "paper, ratio": _number("memory_ratio", ".4f", "paper"),
    },
    "targets": {
        **_LABEL,
        "target accuracy": _number("target", "g", "target"),
        "runs that reach it": _reached,
        "epochs to it": _number("epochs", ".1f", "target"),
        "epsilon to it": _number("epsilon", ".2f", "target"),
    },
    "fair": _FAIR,
    "equal": {
        **_FAIR,
        "90 % interval of the difference": lambda line: _interval(line.get("equivalence")),
        "equal": _equivalent,
    },
}
_SUBTITLES = {
    "runtime": ": time",
    "memory": ": memory",
    "targets": ": how soon a target is reached",
}
