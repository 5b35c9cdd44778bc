"""`vestige statement`: what a run promises about privacy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.options import Json
from vestige.files import write_whole


def statement(
    run: Annotated[Path, typer.Argument(help="A run folder of vestige train.")],
    as_json: Json = False,
    out: Annotated[
        Path | None, typer.Option(help="Write to this file instead of the screen.")
    ] = None,
    ledger: Annotated[
        Path | None,
        typer.Option(help="Of an unfinished run: the ledger file that it shares with others."),
    ] = None,
) -> None:
    """Print the statement of a run, or write it to a file."""
    from vestige.statement import check, markdown, read

    if (run / "checkpoint.pt").is_file():
        # Of a run that was killed or interrupted: the ledger knows of more than an earlier page.
        from vestige.train.unfinished import of_folder

        found = of_folder(run, ledger)
        check(found)
    else:
        found = read(run)
    text = f"{json.dumps(found, indent=2, allow_nan=False)}\n" if as_json else markdown(found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text)
