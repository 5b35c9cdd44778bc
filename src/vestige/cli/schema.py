"""`vestige schema`: a draft of the public schema of somebody's own data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from vestige.cli.train import parse_names
from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.train.schema import TASKS, default_path, is_own


def schema(
    data: Annotated[
        Path, typer.Argument(help="A CSV or parquet file, or a folder of images by class.")
    ],
    target: Annotated[
        str, typer.Option(metavar="COLUMN", help="What to predict; several with commas.")
    ] = "",
    task: Annotated[str, typer.Option(help=f"{', '.join(TASKS)}.")] = TASKS[0],
    out: Annotated[
        Path | None, typer.Option(help="The file to write. Default: NAME.schema.toml beside it.")
    ] = None,
) -> None:
    """Write the draft, and say what a person has to declare."""
    from vestige.train.own_data import drafted

    if task not in TASKS:
        raise ConfigError(f"task {task!r} is unknown: choose one of {', '.join(TASKS)}.")
    if not data.exists() or not is_own(data):
        raise ConfigError(
            f"{str(data)!r} is no CSV or parquet file and no folder that can be read: check the "
            "path. An .npz file needs no schema."
        )
    path = default_path(data) if out is None else out
    if path.exists():
        raise ConfigError(f"{str(path)!r} is there already: remove it, or give another as --out.")
    text = drafted(data, parse_names(target), task)
    write_whole(path, text)
    typer.echo(f"wrote {path}: a draft without any value of the data")
    typer.echo(
        "complete each line that says DECLARE (ranges, categories, frequencies), and give "
        "--dataset-size where the number of records is confidential: these depend on the data, and "
        "reading them off it would not be private"
    )
    chosen = "" if out is None else f" --schema {path}"
    typer.echo(f"then: vestige train --data {data}{chosen} --epsilon 3")
