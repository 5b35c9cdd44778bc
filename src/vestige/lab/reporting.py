"""`vestige report`: tables, plots and pages from rows alone.

A results folder has `rows.jsonl` and one folder for each experiment, named like it. Reports of the
same rows are the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from vestige.errors import ConfigError
from vestige.lab import catalogue
from vestige.lab import report as pages
from vestige.lab.definition import Experiment
from vestige.lab.grid import Row
from vestige.lab.report.checks import check_rows, naming_damage
from vestige.lab.rows import ROWS, Rows
from vestige.lab.runner import QUICK
from vestige.lab.summary import fitted, rows_of, summarised
from vestige.lab.tables import markdown

TABLE, NUMBERS = "table.md", "table.json"


def report(folder: Path) -> list[Path]:
    """Write the tables of an experiment's folder, or of all experiments in a results folder.

    `folder` is RESULTS/NAME or RESULTS, with RESULTS/rows.jsonl. Returns the files, in order.
    """
    if (folder / ROWS).is_file():
        known = [_adapted(catalogue.find(name), folder) for name in catalogue.names()]
        written = write_all(known, folder)
        if not written:
            raise ConfigError(f"{folder / ROWS} holds no row of a known experiment.")
        return written
    root = folder.parent
    if not (root / ROWS).is_file():
        raise ConfigError(
            f"{str(folder)!r} is no results folder: neither it nor the folder above it has a "
            f"{ROWS}; give the folder that `vestige reproduce` named."
        )
    rows = Rows(root).refresh()
    return write(_adapted(catalogue.find(folder.name), root), rows, folder)


def write_all(experiments: Iterable[Experiment], root: Path) -> list[Path]:
    """Write the tables of those experiments that have rows in a results folder."""
    rows = Rows(root).refresh()
    written = []
    for experiment in experiments:
        if rows_of(experiment, rows):
            written += write(experiment, rows, root / experiment.name)
    return written


def write(experiment: Experiment, rows: Mapping[str, Row], folder: Path) -> list[Path]:
    """Write tables, plots and page of one experiment; ConfigError where it has no row yet."""
    with naming_damage(f"a row of {experiment.name}", "take its line out of rows.jsonl"):
        return _write(experiment, rows, folder)


def _write(experiment: Experiment, rows: Mapping[str, Row], folder: Path) -> list[Path]:
    experiment = fitted(experiment, rows)
    finished = rows_of(experiment, rows)
    if not finished:
        raise ConfigError(
            f"there is no row of {experiment.name} in {folder.parent / ROWS}: run `vestige "
            f"reproduce {experiment.name}` first."
        )
    check_rows(finished)
    numbers = summarised(experiment, finished)
    # By the last two names of the path: where the results lie does not change the bytes.
    root = folder.absolute().parent.name
    command = f"vestige report {root}/{experiment.name}"
    text = json.dumps({"made_by": command} | numbers, indent=1, allow_nan=False, sort_keys=True)
    tables = {TABLE: markdown(experiment, numbers, command, f"{root}/{ROWS}"), NUMBERS: f"{text}\n"}
    return [*pages.write_files(folder, tables), *pages.write(experiment, finished, folder)]


def _adapted(experiment: Experiment, root: Path) -> Experiment:
    """Smoke runs are in a folder called quick, and nothing else is."""
    return experiment.quickened() if root.absolute().name == QUICK else experiment
