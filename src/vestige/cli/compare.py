"""`vestige compare`: methods on your data at equal privacy. The options of a run are train's."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vestige.checks import round_up
from vestige.cli import INTERRUPTED
from vestige.cli.options import Form, Json, options_of
from vestige.cli.render import print_json, wide_console
from vestige.lab import comparison
from vestige.train.config import TrainConfig
from vestige.train.training import Progress

SHARED = "dataset model delta accountant lot epochs clip clipping lr device data_dir".split()


@options_of(
    TrainConfig,
    only=(*SHARED, "train_size", "test_size"),
    forms={
        "clip": Form(help="Clipping norm."),
        "lr": Form(help="One learning rate for all. Default: each method's own."),
    },
)
def compare(
    methods: Annotated[str, typer.Option(help="The methods to compare, with commas.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon of one run.")],
    base: TrainConfig,
    match: Annotated[
        str,
        typer.Option(
            help="epsilon: the same epsilon for every method. sigma: the noise at which DP-SGD "
            "reaches it, for every method."
        ),
    ] = "epsilon",
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Choose each method's learning rate of four on held-out records."
        ),
    ] = False,
    seeds: Annotated[int, typer.Option(help="Runs of each method that are reported.")] = 5,
    as_json: Json = False,
) -> None:
    """Run every method with every seed, and print the comparison."""
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    study = comparison.Study(names, epsilon, base, match, tune, seeds)
    with Console(stderr=True).status("starting") as status:

        def tell(name: str, progress: Progress) -> None:
            steps = f" {progress.step}/{progress.steps}" if progress.steps else ""
            status.update(f"{name}{steps}  ({study.runs} runs)")

        report = comparison.compare(study, tell)
    if as_json:
        print_json(report)
    else:
        _print_comparison(report)
    if report["interrupted"]:
        typer.echo("vestige: interrupted; the report is of the runs so far", err=True)
        raise typer.Exit(INTERRUPTED)


def _print_comparison(report: dict[str, Any]) -> None:
    table = Table(title=f"{report['dataset']}, {report['model']}: accuracy on the held-out split")
    headings = ("method", "lr", "sigma", "epsilon", "accuracy", "95 % interval", "difference", "p")
    for heading in (*headings, "p (Holm)"):
        table.add_column(heading, no_wrap=True)
    for line in report["methods"]:
        accuracy, test = line["accuracy"], line["against_reference"] or {}
        std = "" if accuracy["std"] is None else f" ± {accuracy['std']:.4f}"
        low, noise = accuracy["low"], line["noise_multiplier"]
        chances = [test.get(name) for name in ("p", "p_holm")]
        table.add_row(
            line["method"],
            f"{line['lr']:g}",
            f"{noise:.4g}" if isinstance(noise, int | float) else "a schedule",
            round_up(line["epsilon"]),
            f"{accuracy['mean']:.4f}{std}",
            "" if low is None else f"[{low:.4f}, {accuracy['high']:.4f}]",
            f"{test['difference']:+.4f}" if test else "",
            *("" if p is None else f"{p:.3g}" for p in chances),
        )
    console = wide_console()
    console.print(table)
    console.print(f"p: paired t test against {report['reference']}", markup=False)
    for sentence in comparison.words(report):
        console.print(sentence, markup=False)
