"""`vestige report`: tables, plots and pages from rows alone, or from the folder of a run.

A results folder has `rows.jsonl` and one folder for each experiment, named like it. Reports of the
same rows are the same bytes.

Guarantee: a report is a function of rows, or of what a run folder already holds, and costs no
privacy beyond it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.lab import catalogue
from vestige.lab.definition import Experiment
from vestige.lab.grid import Row
from vestige.lab.report.checks import check_rows, naming_damage
from vestige.lab.rows import ROWS, Rows
from vestige.lab.runner import QUICK
from vestige.lab.summary import (
    Levels,
    begun,
    ceilings,
    fitted,
    largest_epsilon,
    private_levels,
    rows_of,
    summarised,
)
from vestige.lab.tables import markdown

if TYPE_CHECKING:
    from vestige.lab.plots import Plot

# The experiments that have the model without privacy, and another private one on its images.
CEILING, SCATTERING = "ceiling", "ceiling-scatter"
TABLE, NUMBERS, PAGE = "table.md", "table.json", "report.html"


def report(folder: Path) -> list[Path]:
    """Write the report of an experiment's folder, or of all experiments in a results folder.

    `folder` is RESULTS/NAME or RESULTS, with RESULTS/rows.jsonl. Returns the files, in order.
    """
    if (folder / ROWS).is_file():
        written = write_all((_adapted(name, folder) for name in catalogue.names()), folder)
        if not written:
            raise ConfigError(f"{folder / ROWS} holds no row of a known experiment.")
        return written
    root = folder.parent
    if not (root / ROWS).is_file():
        raise ConfigError(
            f"{str(folder)!r} is no results folder: neither it nor the folder above it has a "
            f"{ROWS}; give the folder that `vestige reproduce` named."
        )
    return write_found(_adapted(folder.name, root), Rows(root).refresh(), folder)


def _adapted(name: str, root: Path) -> Experiment:
    """Smoke runs are in a folder called quick, and nothing else is."""
    experiment = catalogue.find(name)
    return experiment.quickened() if root.absolute().name == QUICK else experiment


def write_all(experiments: Iterable[Experiment], root: Path) -> list[Path]:
    """Write the reports of those experiments that have begun in a results folder."""
    rows = Rows(root).refresh()
    return [
        path
        for experiment in experiments
        if begun(experiment, rows)
        for path in write_found(experiment, rows, root / experiment.name)
    ]


def write_found(experiment: Experiment, rows: Mapping[str, Row], folder: Path) -> list[Path]:
    """Write the report of one experiment; ConfigError where none of the rows is of it."""
    experiment = fitted(experiment, rows)
    finished = rows_of(experiment, rows)
    if not finished:
        raise ConfigError(
            f"there is no row of {experiment.name} in {folder.parent / ROWS}: run `vestige "
            f"reproduce {experiment.name}` first."
        )
    return write(experiment, finished, folder, levels_of(experiment, rows))


def levels_of(experiment: Experiment, rows: Mapping[str, Row]) -> dict[str, dict[str, float]]:
    """What is known of the experiment's images: its model without privacy, and a better one.

    A user's folder of experiments need not have either.
    """
    if experiment.quick or experiment.kind != "training":
        return {}
    levels: dict[str, dict[str, float]] = {}
    images = ("train_range", "test_range")
    if _shares(experiment, CEILING, ("model", *images)):
        levels["without privacy"] = ceilings(catalogue.find(CEILING), rows)
    if _shares(experiment, SCATTERING, images):
        private = catalogue.find(SCATTERING)
        label = f"scattering features, epsilon {largest_epsilon(private):g}"
        levels[label] = private_levels(private, rows)
    return levels


def _shares(experiment: Experiment, name: str, settings: Sequence[str]) -> bool:
    """Whether another experiment is there, and has the same of these settings."""
    if name not in catalogue.names() or experiment.name == name:
        return False
    ours, theirs = experiment.protocol.values, catalogue.find(name).protocol.values
    return all(ours.get(setting) == theirs[setting] for setting in settings)


def write(
    experiment: Experiment,
    rows: Sequence[Row],
    folder: Path,
    levels: Levels = MappingProxyType({}),
) -> list[Path]:
    """Write tables, plots and page of an experiment from `rows_of` it; returns the files.

    ConfigError names a broken row.
    """
    from vestige.lab.report.experiment_page import experiment_page
    from vestige.lab.report.experiment_plots import plots

    with naming_damage(f"a row of {experiment.name}", "take its line out of rows.jsonl"):
        check_rows(rows)
        numbers = summarised(experiment, rows, levels)
        # By the last two names of the path: where the results lie does not change the bytes.
        root = folder.absolute().parent.name
        command = f"vestige report {root}/{folder.name}"
        text = json.dumps({"made_by": command} | numbers, indent=1, allow_nan=False, sort_keys=True)
        tables = {TABLE: markdown(experiment, numbers, command, f"{root}/{ROWS}")}
        made = plots(experiment, rows, numbers)
        page = experiment_page(experiment, rows, numbers, made, command)
        return write_files(folder, tables | {NUMBERS: f"{text}\n"} | _drawn(made) | {PAGE: page})


def write_run(folder: Path) -> list[Path]:
    """Write the plots and the page of a run folder of `vestige train`; returns the files."""
    from vestige.lab.report.run_data import read_run, trained_layers
    from vestige.lab.report.run_page import run_page
    from vestige.lab.report.run_plots import run_plots

    run = read_run(folder)
    with naming_damage(f"a file in {folder}", "train again, or restore the file"):
        layers = trained_layers(folder, run.result.get("settings") or {})
        made = run_plots(run, layers)
        files = _drawn(made.values()) | {PAGE: run_page(run, made, layers)}
    return write_files(folder, files)


def _drawn(plots: Iterable[Plot]) -> dict[str, str]:
    return {f"{plot.name}.svg": plot.svg for plot in plots if plot.svg}


def write_files(folder: Path, files: Mapping[str, str]) -> list[Path]:
    """Write texts by their names, each whole or not at all; OSError says what to do."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            write_whole(folder / name, content)
    except OSError as error:
        raise OSError(
            f"the report in {folder} cannot be written ({error.strerror}): what it is made of is "
            "untouched; mend that and give the same command again."
        ) from error
    return [folder / name for name in files]
