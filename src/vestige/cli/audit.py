"""The command `vestige audit`: lower bounds on epsilon from attacks on the real engine. Thin."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from vestige.audit.options import AuditOptions
from vestige.checks import round_down, round_up
from vestige.cli.options import Json, options_of
from vestige.cli.render import print_json, print_pairs
from vestige.files import write_whole

if TYPE_CHECKING:
    from vestige.audit.result import AuditResult

_PLOT, _NUMBERS = "tradeoff.png", "audit.json"


@options_of(AuditOptions)
def audit(
    options: AuditOptions,
    out: Annotated[
        Path | None,
        typer.Option(
            help=f"A plot of the trade-off curves (.png, .pdf, .svg), or a folder for {_PLOT} and "
            f"{_NUMBERS}."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Attack the real engine; exit code 1 if a bound exceeds what the engine claims."""
    plot, numbers = _places(out)
    with _progress() as tell:
        from vestige.audit.attack import run

        result = run(options, tell)
    if plot is not None:
        from vestige.audit.plot import write

        write(result, plot)
    found = result.as_dict()
    if numbers is not None:
        import json

        write_whole(numbers, json.dumps(found, indent=2, allow_nan=False) + "\n")
    if as_json:
        print_json(found)
    else:
        _print(result)
        for path in (plot, numbers):
            if path is not None:
                typer.echo(f"wrote {path}")
    if result.epsilon_claimed is not None and result.violated:
        raise typer.Exit(1)


def _places(out: Path | None) -> tuple[Path | None, Path | None]:
    """Where the plot and the numbers go; ConfigError if they could not."""
    from vestige.audit.plot_files import check_plot

    if out is None:
        return None, None
    if out.suffix:
        check_plot(out)
        return out, None
    out.mkdir(parents=True, exist_ok=True)
    return out / _PLOT, out / _NUMBERS


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr where that is a terminal; it leaves nothing behind."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn())
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def _print(result: AuditResult) -> None:
    how = f"{result.trials} canaries, {result.steps} steps, rate {result.sample_rate:g}"
    pair, level = f"delta {result.delta:g}", f"at {result.level} confidence"
    claim, published = result.epsilon_claimed, result.epsilon_published
    told = [
        ("attacked", f"{result.method}, {result.mode}: {how}"),
        ("claimed", "none" if claim is None else f"epsilon {round_up(claim)}, {pair}"),
    ]
    if published is not None:
        told.append(("published", f"epsilon {round_up(published)}, {pair}"))
    free = round_down(result.epsilon_lower)
    told.append(("at least", f"epsilon {free}, free of assumptions, {level}"))
    if result.epsilon_lower_family is not None:
        family = round_down(result.epsilon_lower_family)
        told.append(("", f"epsilon {family}, through the mechanism's family, {level}"))
    noise = f"multiplier {result.noise_multiplier:.4g}"
    if result.noise_multiplier_attacked is not None:
        upper = result.noise_multiplier_upper
        most = "any" if upper is None else f"at most {upper:.4g}"
        attacked = result.noise_multiplier_attacked
        noise += f"; effective {attacked:.4g}, and the trials allow {most}"
    told += [("noise", noise), ("time", f"{result.seconds:.1f} s")]
    print_pairs(told + [("note", note) for note in result.notes])
    typer.echo(verdict(result))


def verdict(result: AuditResult) -> str:
    """The result in one sentence."""
    if result.epsilon_claimed is None:
        if result.epsilon_published is None:
            return "There is no claim to hold the bounds against."
        if result.violated:
            return "VIOLATED: the bound exceeds what the paper would claim. No guarantee is given."
        return "The published claim was not refuted by these trials. No guarantee is given."
    if result.violated:
        return "VIOLATED: a bound exceeds the claim. The engine is broken, or this was bad luck."
    return "Not refuted: no bound exceeds the claim. That is no proof of it."
