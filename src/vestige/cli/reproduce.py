"""`vestige reproduce`: a table or figure of the papers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vestige.cli import INTERRUPTED
from vestige.cli.options import Json
from vestige.cli.render import print_json, wide_console
from vestige.lab import catalogue, reporting, runner
from vestige.lab.progress import best_display
from vestige.lab.rows import ROWS
from vestige.statement.escaping import in_terminal


def reproduce(
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Experiments by name, the path of a .toml file, or all."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="A smoke run: few epochs and seeds, kept in its own folder."),
    ] = False,
    seeds: Annotated[
        int | None, typer.Option(help="Number of seeds. Default: the experiment's.")
    ] = None,
    workers: Annotated[int, typer.Option(help="Processes that share the rows.")] = 1,
    out: Annotated[
        Path | None,
        typer.Option(help="Folder with rows.jsonl. Default: results; smoke runs: runs/quick."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="auto, cpu, cuda or cuda:N. Default: the experiment's, mostly cpu."),
    ] = None,
    column: Annotated[str, typer.Option(help="published, fair or both.")] = "both",
    minutes: Annotated[
        float | None, typer.Option(help="Start no row that would probably end later.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Run what is not finished yet, write tables and plots, and say what is left."""
    if list_:
        _print_list(catalogue.described(), as_json)
        return
    request = runner.Request(
        experiments=tuple(catalogue.chosen(names or [])),
        out=out,
        quick=quick,
        seeds=seeds,
        workers=workers,
        device=device,
        column=column,
        minutes=minutes,
    )
    if quick and not as_json:
        typer.echo(f"vestige: {runner.SMOKE}", err=True)
    outcome = runner.reproduce(request, best_display(quiet=as_json))
    written = reporting.write_all(request.adapted, outcome.root)
    if as_json:
        print_json(
            {
                "rows": str(outcome.root / ROWS),
                "total": outcome.total,
                "finished": outcome.finished,
                "made": outcome.made,
                "failures": outcome.failures,
                "interrupted": outcome.interrupted,
                "smoke_run": quick,
                "files": [str(path) for path in written],
            }
        )
    else:
        for sentence in runner.what_next(request, outcome):
            typer.echo(sentence)
        for path in written:
            typer.echo(f"wrote {path}")
    if outcome.interrupted:
        raise typer.Exit(INTERRUPTED)
    if not outcome.complete and not outcome.deadline:
        raise typer.Exit(1)


def _print_list(experiments: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        print_json({"experiments": experiments})
        return
    table = Table(title="rows: as published, tuning and fair")
    for heading in ("name", "what", "paper", "rows"):
        table.add_column(heading, no_wrap=heading == "name")
    for one in experiments:
        counts = f"{one['published']} + {one['tuning']} + {one['fair']}"
        paper = ", ".join(part for part in (one["paper"], one["item"]) if part)
        table.add_row(*map(in_terminal, (one["name"], one["title"], paper, counts)))
    wide_console().print(table)
