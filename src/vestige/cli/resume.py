"""`vestige resume`: going on with a run that was killed or interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import Json, OwnModel, Run
from vestige.cli.render import Display, print_run, write_pages
from vestige.train import training
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
    with Display(quiet=as_json) as display:
        result = training.resume(
            run, progress=display, noise_seed=noise_seed, ledger=ledger, model=model
        )
    if unfinished:
        write_pages(run)
    print_run(result, as_json, ledger)
