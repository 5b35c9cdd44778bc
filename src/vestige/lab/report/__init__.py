"""Reports that people would rather look at: plots, and one page that needs nothing else.

`write` makes them for an experiment, from its rows alone; `write_run` for the folder of a run.
Files of the same rows are the same bytes.

Guarantee: a report is a function of rows, or of what a run folder already holds, and costs no
privacy beyond it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.lab.report.checks import check_rows, naming_damage
from vestige.lab.report.files import write_text

if TYPE_CHECKING:
    from vestige.lab.definition import Experiment

PAGE = "report.html"

__all__ = ["PAGE", "check_rows", "write", "write_run"]


def write(experiment: Experiment, rows: Sequence[Mapping[str, Any]], folder: Path) -> list[Path]:
    """Write the plots and the page of an experiment; returns the files.

    `rows` are those of `vestige.lab.summary.rows_of`. ConfigError names a broken row.
    """
    from vestige.lab.report import draw
    from vestige.lab.report.experiment_page import experiment_page
    from vestige.lab.report.experiment_plots import plots
    from vestige.lab.summary import summarised

    check_rows(rows)
    numbers = summarised(experiment, [dict(row) for row in rows])
    # By the last two names of the path: where the results lie does not change the bytes.
    made_by = f"vestige report {folder.absolute().parent.name}/{folder.name}"
    made = plots(experiment, rows, numbers)
    files = {f"{plot.name}.svg": draw.file(plot) for plot in made if plot.panels}
    files[PAGE] = experiment_page(experiment, rows, numbers, made, made_by)
    return [write_text(folder / name, content) for name, content in files.items()]


def write_run(folder: Path) -> list[Path]:
    """Write the plots and the page of a run folder of `vestige train`; returns the files."""
    from vestige.lab.report import draw
    from vestige.lab.report.run_data import read_run, trained_layers
    from vestige.lab.report.run_page import run_page
    from vestige.lab.report.run_plots import run_plots, spectrum_plots

    run = read_run(folder)
    with naming_damage(f"a file in {folder}", "train again, or restore the file"):
        layers = trained_layers(folder, run.result.get("settings") or {})
        made = [*run_plots(run), *spectrum_plots(layers)]
        files = {f"{plot.name}.svg": draw.file(plot) for plot in made if plot.panels}
        files[PAGE] = run_page(run, made, layers)
    return [write_text(folder / name, content) for name, content in files.items()]
