"""`vestige spectrum`: how heavy-tailed the layers of a model are."""

from __future__ import annotations

import os

import typer

from vestige.cli.options import Form, Json, options_of
from vestige.cli.render import print_json, wide_console
from vestige.lab import spectrum_report
from vestige.lab.spectrum_report import Request


@options_of(Request, forms={"target": Form(argument=True)})
def spectrum(request: Request, as_json: Json = False) -> None:
    """Print a table of power-law exponents, and draw the fits."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `train`
    report = spectrum_report.examine(request)
    if as_json:
        print_json(report.as_dict())
    else:
        table = spectrum_report.layer_table(report.layers, report.title)
        wide_console(highlight=True).print(table.rich())
    if request.plot is not None or not as_json:
        spectrum_report.draw(report, request.chosen_plot)
    if not as_json:
        typer.echo(f"plot  {request.chosen_plot}")
