"""`vestige resume`: going on with a run that was killed or interrupted."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import Json, OwnModel, Run
from vestige.cli.render import Display, print_run, write_pages
from vestige.train import training
from vestige.train.ranks import leads
from vestige.train.run_folder import CHECKPOINT


def resume(
    run: Run,
    noise_seed: Annotated[
        int | None,
        typer.Option(help="Test mode: the run's noise seed, where its secret file is gone."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The ledger file that the run shares with others.")
    ] = None,
    model: OwnModel = None,
    as_json: Json = False,
) -> None:
    """Continue the run in a folder, and print the result."""
    unfinished = (run / CHECKPOINT).exists()
    with Display(quiet=as_json) if leads() else contextlib.nullcontext() as display:
        result = training.resume(
            run, progress=display, noise_seed=noise_seed, ledger=ledger, model=model
        )
    if unfinished and leads():
        write_pages(run)
    if leads():
        print_run(result, as_json, ledger)
