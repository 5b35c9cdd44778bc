"""`vestige spectrum`: how heavy-tailed the layers of a model are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import Json
from vestige.cli.render import print_json, wide_console
from vestige.lab import spectrum_report
from vestige.memory.spectrum import ESTIMATORS
from vestige.train.config import MODELS


def spectrum(
    target: Annotated[
        str,
        typer.Argument(
            help="A run folder, a checkpoint file (a state_dict, or a dict that holds one), or a "
            f"built-in model with random weights, made for CIFAR-10: {', '.join(MODELS)}."
        ),
    ],
    estimator: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(ESTIMATORS)}: a fixed tail of the eigenvalues, the tail that fits "
            "best, or what weightwatcher 0.7.7 computes."
        ),
    ] = ESTIMATORS[0],
    tail: Annotated[
        float | None,
        typer.Option(help="The share of the eigenvalues that hill fits, (0, 1]. Default: 0.5."),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            help="Where to plot the fits (.png, .pdf, .svg). Default: spectrum.png, in the run "
            "folder if TARGET is one, else in the current folder; with --json no plot."
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option(help="Seed of a built-in model's weights. Default: 0.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print a table of power-law exponents, and draw the fits."""
    request = spectrum_report.Request(target, estimator, tail, seed, plot)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `train`
    report = spectrum_report.examine(request)
    if as_json:
        print_json(report.as_dict())
    else:
        wide_console(highlight=True).print(spectrum_report.table(report))
    if plot is not None or not as_json:
        spectrum_report.draw(report, request.chosen_plot)
    if not as_json:
        typer.echo(f"plot  {request.chosen_plot}")
