"""What the command line shows: progress, results and tables."""

from __future__ import annotations

import json
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar
from rich.table import Table

from vestige.checks import round_up
from vestige.statement.escaping import in_terminal, printable
from vestige.train.training import Progress


class Display:
    """Shows progress on stderr: a bar on a terminal, otherwise one line for each epoch."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self._lines = not console.is_terminal and not quiet
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[figures]}"),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, figures="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        # A bar that never moved would stand above the error line.
        self._bar.live.transient = kind is not None
        self._bar.stop()

    def __call__(self, progress: Progress) -> None:
        """The callback of `training.train`."""
        self._bar.update(
            self._task,
            description=in_terminal(progress.stage),
            completed=progress.step,
            total=progress.steps or None,
        )
        metrics = progress.metrics
        if metrics is None:
            return
        figures = (
            f"{_epsilon(metrics['epsilon'])}  loss {_loss(metrics['test_loss'])}  "
            f"accuracy {metrics['test_accuracy']:.1%}"
        )
        if "train_loss_outside_guarantee" in metrics:
            loss = _loss(metrics["train_loss_outside_guarantee"])
            figures += f"  train loss {loss} (outside the guarantee)"
        self._bar.update(self._task, figures=figures)
        if self._lines:
            epoch = f"epoch {metrics['epoch']}/{progress.epochs}"
            typer.echo(f"{epoch}  step {progress.step}/{progress.steps}  {figures}", err=True)


def print_json(value: dict[str, Any]) -> None:
    """A result for machines."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_result(result: dict[str, Any]) -> None:
    """What a training run came to."""
    table = pairs()
    table.add_row("accuracy", f"{result['accuracy']:.2%}  on the held-out split")
    table.add_row("loss", _loss(result["loss"]))
    if "averaged_accuracy" in result:
        table.add_row("averaged", f"{result['averaged_accuracy']:.2%}  with averaged weights")
    if "train_loss_outside_guarantee" in result:
        loss = _loss(result["train_loss_outside_guarantee"])
        table.add_row("training loss", f"{loss}  outside the guarantee")
    if result["guarantee"] == "none":
        table.add_row("privacy", "no guarantee: epsilon is infinite")
    else:
        pair = f"(epsilon {round_up(result['epsilon'])}, delta {result['delta']:g})"
        how = f"{result['adjacency']}, {result['accountant']}"
        table.add_row("privacy", f"{pair}  {in_terminal(how)}")
    noise = f"multiplier {result['noise_multiplier']:.4g}"
    if isinstance(result["beta"], float) and result["beta"] < 1:
        accounted = result["noise_multiplier"] / result["beta"]
        noise += f", accounted at {accounted:.4g} (beta {result['beta']:g})"
    table.add_row("noise", f"{noise}, {result['steps']} steps")
    for caveat in result["caveats"]:
        table.add_row("note", in_terminal(caveat))
    Console(highlight=False).print(table)
    # Never wrapped: it is there to be copied.
    typer.echo(f"run folder  {printable(result['folder'])}")


def pairs() -> Table:
    """A table of names and values without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    return table


def _epsilon(value: float | None) -> str:
    return "no guarantee" if value is None else f"epsilon {round_up(value)}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"


def methods_table(rows: Iterable[dict[str, Any]]) -> Table:
    """Every method: what it does, its paper, its memory, its guarantee, its looks at a lot."""
    table = Table(
        box=SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        title="touches: how often a step looks at its lot",
        title_justify="left",
    )
    table.add_column("method", no_wrap=True)
    table.add_column("what it does, its paper, its extra memory")
    table.add_column("guarantee", max_width=14)
    table.add_column("touches", justify="right")
    for row in rows:
        kind = str(row["guarantee"]).partition(":")[0]
        small = f"{row['paper']}\nextra memory: {row['extra_memory']}"
        what = f"{escape(row['summary'])}\n[dim]{escape(small)}[/dim]"
        table.add_row(row["name"], what, kind, str(row["touches"]))
    return table
