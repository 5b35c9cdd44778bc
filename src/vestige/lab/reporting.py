"""`vestige report`: tables, plots and pages from rows alone.

A results folder has `rows.jsonl` and one folder for each experiment, named like it. Reports of the
same rows are the same bytes.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.lab import catalogue
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
    """Write the tables and plots of one experiment; ConfigError where it has no row yet."""
    with naming_damage(f"a row of {experiment.name}", "take its line out of rows.jsonl"):
        return _write(experiment, rows, folder)


def _write(experiment: Experiment, rows: Mapping[str, Row], folder: Path) -> list[Path]:
    from vestige.lab.report import write as draw  # needs matplotlib, which reading rows does not

    experiment = fitted(experiment, rows)
    own = rows_of(experiment, rows)
    if not own:
        raise ConfigError(
            f"there is no row of {experiment.name} in {folder.parent / ROWS}: run `vestige "
            f"reproduce {experiment.name}` first."
        )
    check_rows(own)
    numbers = summarised(experiment, own)
    # By the last two names of the path: where the results lie does not change the bytes.
    root = folder.absolute().parent.name
    command = f"vestige report {root}/{experiment.name}"
    page = markdown(experiment, numbers, command, f"{root}/{ROWS}")
    text = json.dumps({"made_by": command} | numbers, indent=1, allow_nan=False, sort_keys=True)
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in ((TABLE, page), (NUMBERS, f"{text}\n")):
            write_whole(folder / name, content)
            written.append(folder / name)
    except OSError as error:
        raise OSError(
            f"the report of {experiment.name} cannot be written to {folder} ({error.strerror}): "
            "the rows are untouched; mend that and give the same command again."
        ) from error
    return [*written, *draw(experiment, own, folder)]


def _adapted(experiment: Experiment, root: Path) -> Experiment:
    """Smoke runs are in a folder called quick, and nothing else is."""
    return experiment.quickened() if root.absolute().name == QUICK else experiment
