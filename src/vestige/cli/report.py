"""`vestige report`: tables, plots and pages from what is in a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import Json
from vestige.cli.render import print_json
from vestige.lab import report as reports
from vestige.lab.report.run_data import is_run


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="RESULTS/NAME, RESULTS for all experiments in it, or a run folder of train."
        ),
    ],
    as_json: Json = False,
) -> None:
    """Write what the folder can show, and name the files."""
    run = is_run(folder)
    written = reports.write_run(folder) if run else reports.report(folder)
    if as_json:
        kind = "run" if run else "experiments"
        print_json({"kind": kind, "files": [str(path) for path in written]})
        return
    for path in written:
        typer.echo(f"wrote {path}")
