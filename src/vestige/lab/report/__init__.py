"""Reports that people would rather look at: plots, and one page that needs nothing else.

`write` makes them for an experiment, from its rows alone; `write_run` for the folder of a run.
Files of the same rows are the same bytes.

Guarantee: a report is a function of rows, or of what a run folder already holds, and costs no
privacy beyond it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.files import write_whole
from vestige.lab.report.checks import check_rows, naming_damage

if TYPE_CHECKING:
    from vestige.lab.definition import Experiment
    from vestige.lab.report.plots import Plot

PAGE = "report.html"

__all__ = ["PAGE", "check_rows", "write", "write_files", "write_run"]


def write(experiment: Experiment, rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the plots and the page of an experiment; returns the files.

    `rows` are those of `vestige.lab.summary.rows_of`. ConfigError names a broken row.
    """
    from vestige.lab.report.experiment_page import experiment_page
    from vestige.lab.report.experiment_plots import plots
    from vestige.lab.summary import summarised

    check_rows(rows)
    numbers = summarised(experiment, [dict(row) for row in rows])
    # By the last two names of the path: where the results lie does not change the bytes.
    made_by = f"vestige report {folder.absolute().parent.name}/{folder.name}"
    made = plots(experiment, rows, numbers)
    page = experiment_page(experiment, rows, numbers, made, made_by)
    return write_files(folder, _files(made) | {PAGE: page})


def write_run(folder: Path) -> list[Path]:
    """Write the plots and the page of a run folder of `vestige train`; returns the files."""
    from vestige.lab.report.run_data import read_run, trained_layers
    from vestige.lab.report.run_page import run_page
    from vestige.lab.report.run_plots import run_plots

    run = read_run(folder)
    with naming_damage(f"a file in {folder}", "train again, or restore the file"):
        layers = trained_layers(folder, run.result.get("settings") or {})
        made = run_plots(run, layers)
        files = _files(made.values()) | {PAGE: run_page(run, made, layers)}
    return write_files(folder, files)


def _files(plots: Iterable[Plot]) -> dict[str, str]:
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
