"""`vestige demo`: the project's idea in a minute, on digits that are public.

DP-SGD, and the two methods that remember their releases, at the same epsilon. Each run leaves a
folder with its page (curves; gates and spectra where there are some) and its statement.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from vestige.checks import round_up
from vestige.cli import INTERRUPTED
from vestige.cli.options import Json
from vestige.cli.render import Display, print_json, wide_console, write_pages
from vestige.train import training
from vestige.train.checks import check_out
from vestige.train.config import TrainConfig

METHODS = {
    "dp-sgd": "forgets every release",
    "fo": "remembers releases, and trusts those that agree with their trend",
    "sma": "remembers releases, layer by layer, as its spectrum allows",
}


def demo(
    epsilon: Annotated[float, typer.Option(help="The epsilon of each run.")] = 3.0,
    epochs: Annotated[int, typer.Option(help="Epochs of each run.")] = 20,
    out: Annotated[Path | None, typer.Option(help="A new or empty folder for the runs.")] = None,
    as_json: Json = False,
) -> None:
    """Train three times on the digits, and print what came out."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    folder = out or Path("runs") / f"demo-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
    check_out(folder, fresh=True)
    runs = [
        TrainConfig(method=name, epsilon=epsilon, epochs=epochs, out=folder / name)
        for name in METHODS
    ]
    results = []
    for config in runs:
        if not as_json:
            typer.echo(f"{config.method}: {METHODS[config.method]}", err=True)
        with Display(quiet=as_json) as display:
            results.append(training.train(config, progress=display))
        write_pages(Path(results[-1]["folder"]))
        if results[-1]["interrupted"]:
            break
    if as_json:
        print_json({"folder": str(folder), "runs": results})
    else:
        _print(results)
    if results[-1]["interrupted"]:
        raise typer.Exit(INTERRUPTED)


def _print(results: list[dict[str, Any]]) -> None:
    table = Table("method", "accuracy", "epsilon", "noise", "page", "statement")
    for result in results:
        home = Path(result["folder"])
        numbers = (f"{result['accuracy']:.1%}", round_up(result["epsilon"]))
        noise = f"{result['noise_multiplier']:.3f}"
        pages = (str(home / "report.html"), str(home / "statement.html"))
        table.add_row(result["method"], *numbers, noise, *pages)
    wide_console().print(table)
    typer.echo(
        "One run each: a percent or two between them is chance. `vestige compare --methods "
        "dp-sgd,fo,sma --epsilon 3` repeats and tests. The digits are public; your own data: "
        "docs/start.md."
    )
