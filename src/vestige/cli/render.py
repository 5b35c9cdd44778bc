"""What the command line shows: progress, results and tables."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console
from rich.progress import Progress as Bar
from rich.progress import TextColumn
from rich.table import Table

from vestige.checks import printable, round_up
from vestige.cli import INTERRUPTED
from vestige.errors import ConfigError
from vestige.files import write_whole
from vestige.lab.progress import WIDE, bar_columns
from vestige.statement.escaping import in_terminal
from vestige.statement.model import HTML_FILE

if TYPE_CHECKING:
    from vestige.train.training import Progress


class Display:
    """Shows progress on stderr: a bar on a terminal, otherwise one line for each epoch."""

    def __init__(self, quiet: bool) -> None:
        console = Console(stderr=True)
        self._lines = not console.is_terminal and not quiet
        self._wide = console.width >= WIDE
        bar, counts, time = bar_columns(console.width)
        self._bar = Bar(
            TextColumn("{task.description}"),
            *(bar, counts, TextColumn("{task.fields[figures]}"), time),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("starting", total=None, figures="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
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
        # On a narrow terminal the loss has no room, and on none the training loss; lines have all.
        roomy = self._wide or self._lines
        loss = f"loss {_loss(metrics['test_loss'])}  " if roomy else ""
        figures = f"{_epsilon(metrics['epsilon'])}  {loss}"
        if metrics["test_accuracy"] is None:
            figures += f"mean error {_loss(metrics.get('test_mae'))}"
        else:
            figures += f"accuracy {metrics['test_accuracy']:.1%}"
        self._bar.update(self._task, figures=figures)
        if self._lines:
            if "train_loss_outside_guarantee" in metrics:
                loss = _loss(metrics["train_loss_outside_guarantee"])
                figures += f"  train loss {loss} (outside the guarantee)"
            epoch = f"epoch {metrics['epoch']}/{progress.epochs}"
            typer.echo(f"{epoch}  step {progress.step}/{progress.steps}  {figures}", err=True)


def print_json(value: dict[str, Any]) -> None:
    """A result for machines."""
    typer.echo(json.dumps(value, indent=2, allow_nan=False))


def print_run(result: dict[str, Any], as_json: bool, ledger: Path | None) -> None:
    """The result of a run; one that was interrupted ends with exit code 130."""
    if as_json:
        print_json(result)
    else:
        print_result(result)
    if result.get("budget_spent"):
        typer.echo(
            f"vestige: stopped after {result['steps']} steps: one more would exceed max_epsilon "
            f"{result['max_epsilon']:g}",
            err=True,
        )
    if result["interrupted"]:
        folder = printable(result["folder"])
        shared = "" if ledger is None else f" --ledger {printable(str(ledger))}"
        typer.echo(
            f"vestige: interrupted after {result['steps']} steps; what was trained so far is in "
            f"{folder}; go on with: vestige resume {folder}{shared}",
            err=True,
        )
        raise typer.Exit(INTERRUPTED)


def write_pages(folder: Path) -> None:
    """The pages of a run folder: what it came to, and its statement, linked with each other."""
    from vestige.lab import report
    from vestige.statement import html, read

    write_whole(folder / HTML_FILE, html(read(folder)))
    with contextlib.suppress(ConfigError):  # without a line of metrics there is nothing to draw
        report.write_run(folder)


def print_result(result: Mapping[str, Any]) -> None:
    """What a training run came to."""
    own = "  (exact, not for publication)" if "not for publication" in result["measured_on"] else ""
    place = f"  on the held-out split{own}"
    told = [("loss", _loss(result["loss"]) + (place if own else ""))]
    if result["accuracy"] is not None:
        told.insert(0, ("accuracy", f"{result['accuracy']:.2%}{place}"))
    for name in ("balanced_accuracy", "auc", "rmse", "mae"):
        value = result["metrics"].get(name)
        if value is not None and own:
            told.append((name.replace("_", " "), f"{value:.4g}{own}"))
    if "held_out_release" in result:
        noisy = result["held_out_release"]
        name = "mae" if "mae" in noisy else "accuracy"
        cost = f"epsilon {round_up(noisy['epsilon'])} of the held-out records"
        figure = f"{noisy[name]:.4g}"
        if "standard_error" in noisy:  # a search's figure is the best of many
            figure += f" ± {noisy['standard_error']:.2g}"
        told.append((f"noisy {name}", f"{figure}  may be published ({cost})"))
    if result.get("averaged_accuracy") is not None:
        told.append(("averaged", f"{result['averaged_accuracy']:.2%}  with averaged weights"))
    if "train_loss_outside_guarantee" in result:
        loss = _loss(result["train_loss_outside_guarantee"])
        told.append(("training loss", f"{loss}  outside the guarantee"))
    privacy = "no guarantee: epsilon is infinite"
    if result["guarantee"] != "none":
        pair = f"(epsilon {round_up(result['epsilon'])}, delta {result['delta']:g})"
        how = in_terminal(f"{result['adjacency']}, {result['accountant']}")
        privacy = f"{pair}  {how}"
    told.append(("privacy", privacy))
    noise = f"multiplier {result['noise_multiplier']:.4g}"
    if isinstance(result["beta"], float) and result["beta"] < 1:
        accounted = result["noise_multiplier"] / result["beta"]
        noise += f", accounted at {accounted:.4g} (beta {result['beta']:g})"
    told.append(("noise", f"{noise}, {result['steps']} steps"))
    print_pairs(told + [("note", in_terminal(caveat)) for caveat in result["caveats"]])
    # Never wrapped: it is there to be copied.
    typer.echo(f"run folder  {printable(result['folder'])}")


def wide_console(width: int = 200, highlight: bool = False) -> Console:
    """A console for tables: in a file or a pipe, where nothing needs to be folded, it is wide."""
    console = Console(highlight=highlight)
    if not console.is_terminal:
        console.width = width
    return console


def print_pairs(pairs: Iterable[tuple[str, str]], highlight: bool = False) -> None:
    """Names and values in two columns, without lines."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    for name, value in pairs:
        table.add_row(name, value)
    Console(highlight=highlight).print(table)


def _epsilon(value: float | None) -> str:
    return "no guarantee" if value is None else f"epsilon {round_up(value)}"


def _loss(value: float | None) -> str:
    return "not finite" if value is None else f"{value:.4f}"
