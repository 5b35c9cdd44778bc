"""`vestige predict`: what the model of a run says about new records."""

from __future__ import annotations

import csv
import io
import re
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from vestige.checks import printable
from vestige.cli.options import Json, OwnModel, Run
from vestige.cli.render import print_json
from vestige.files import write_whole


def predict(
    run: Run,
    data: Annotated[
        Path,
        typer.Argument(
            metavar="FILE", help="Records like the training data: a table, images, or an .npz file."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Write to this CSV file instead of the screen.")
    ] = None,
    model: OwnModel = None,
    as_json: Json = False,
) -> None:
    """One line for each record: the prediction, and the probability of each class."""
    from vestige.train.saved_model import load

    with warnings.catch_warnings(record=True) as notes:
        warnings.simplefilter("always")
        found = load(run, model).predict(data)
    for note in (note for note in notes if note.category is UserWarning):
        typer.echo(f"vestige: {printable(str(note.message))}", err=True)
    if as_json and out is None:
        print_json({"predictions": found})
        return
    text = as_csv(found)
    if out is None:
        typer.echo(text, nl=False)
    else:
        write_whole(out, text)
        typer.echo(f"wrote {out}: {len(found)} predictions")


_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?(inf|nan)", re.IGNORECASE)


def _cell(value: Any) -> Any:
    """Text that a program for tables shows and does not run: names may be somebody else's."""
    text = str(value)
    formula = text.startswith(("=", "+", "-", "@", "\t", "\r")) and not _NUMBER.fullmatch(text)
    return f"'{text}" if formula else value


def as_csv(found: list[dict[str, Any]]) -> str:
    """The predictions as a table."""
    buffer = io.StringIO()
    writer = csv.writer(buffer, lineterminator="\n")
    for number, one in enumerate(found):
        said, chances = one["prediction"], one.get("probabilities", {})
        cells = {"file": one["file"]} if "file" in one else {}
        if isinstance(said, dict):  # regression: one column for each target
            cells |= {name: f"{value:.6g}" for name, value in said.items()}
        else:
            cells |= {"prediction": " ".join(said) if isinstance(said, list) else said}
        cells |= {f"p({name})": f"{chance:.4f}" for name, chance in chances.items()}
        if not number:
            writer.writerow(map(_cell, cells))
        writer.writerow(map(_cell, cells.values()))
    return buffer.getvalue()
