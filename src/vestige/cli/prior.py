"""`vestige prior`: features from images of a random process, for `vestige train --recipe prior`."""

from __future__ import annotations

import os

import typer

from vestige.cli import INTERRUPTED
from vestige.cli.options import Form, Json, options_of
from vestige.cli.render import Display, print_json
from vestige.train.recipes.pretraining import Pretraining
from vestige.train.training import Progress


@options_of(Pretraining, forms={"file": Form(argument=True)})
def prior(settings: Pretraining, as_json: Json = False) -> None:
    """Begin, go on or say that nothing is left."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # as for `train`
    with Display(quiet=as_json) as display:
        made = settings.run(
            lambda step, steps: display(Progress("learning from random images", step, steps))
        )
    if as_json:
        print_json(made)
    elif made["done"]:
        typer.echo(f"weights  {made['file']}, {made['step']} steps: nothing is left")
    else:
        told = f"step {made['step']} of {made['steps']}; the same command goes on"
        typer.echo(f"weights  {made['file']}, unfinished: {told}")
    if made["interrupted"]:
        raise typer.Exit(INTERRUPTED)
