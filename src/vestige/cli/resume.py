"""`vestige resume`: going on with a run that was killed or interrupted."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import Json
from vestige.cli.render import Display, print_run
from vestige.train import training


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    noise_seed: Annotated[
        int | None,
        typer.Option(help="Test mode: the run's noise seed, where its secret file is gone."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The ledger file that the run shares with others.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue the run in a folder, and print the result."""
    with Display(quiet=as_json) as display:
        result = training.resume(run, progress=display, noise_seed=noise_seed, ledger=ledger)
    print_run(result, as_json, ledger)
