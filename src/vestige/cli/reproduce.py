"""`vestige reproduce`: a table or figure of the papers."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.table import Table

from vestige.cli import INTERRUPTED
from vestige.cli.options import Json, options_of
from vestige.cli.render import print_json, wide_console
from vestige.lab import catalogue, report, runner
from vestige.lab.progress import best_display
from vestige.lab.rows import ROWS
from vestige.statement.escaping import in_terminal


@options_of(runner.RunOptions)
def reproduce(
    *,
    names: Annotated[
        list[str] | None,
        typer.Argument(help="Experiments by name, the path of a .toml file, or all."),
    ] = None,
    list_: Annotated[bool, typer.Option("--list", help="List the experiments.")] = False,
    options: runner.RunOptions,
    as_json: Json = False,
) -> None:
    """Run what is not finished yet, write tables and plots, and say what is left."""
    if list_:
        _print_list(catalogue.described(), as_json)
        return
    request = runner.Request(experiments=tuple(catalogue.chosen(names or [])), **dict(options))
    if request.quick and not as_json:
        typer.echo(f"vestige: {runner.SMOKE}", err=True)
    outcome = runner.reproduce(request, best_display(quiet=as_json))
    written = report.write_all(request.adapted, outcome.root)
    if as_json:
        counted = ("total", "finished", "made", "failures", "interrupted")
        print_json(
            {"rows": str(outcome.root / ROWS)}
            | {name: getattr(outcome, name) for name in counted}
            | {"smoke_run": request.quick, "files": [str(path) for path in written]}
        )
    else:
        files = (f"wrote {path}" for path in written)
        typer.echo("\n".join([*runner.what_next(request, outcome), *files]))
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
