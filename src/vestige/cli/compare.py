"""`vestige compare`: methods on your data at equal privacy. The options of a run are train's."""

from __future__ import annotations

from typing import Annotated

import typer
from pydantic import Field
from rich.console import Console

from vestige.checks import printable
from vestige.cli import INTERRUPTED
from vestige.cli.options import Form, Json, options_of
from vestige.cli.render import print_json, wide_console
from vestige.cli.train import OWN_DATA
from vestige.lab import comparison, comparison_report
from vestige.privacy.options import File, Options
from vestige.train.config import TrainConfig
from vestige.train.training import Progress

SHARED = (
    *"dataset target schema_file task model delta accountant lot epochs".split(),
    *"clip clipping lr device data_dir".split(),
)


class Design(Options):
    """How methods are compared, and what is kept of it."""

    match: str = Field(
        default="epsilon",
        description="epsilon: the same epsilon for every method. sigma: the noise at which DP-SGD "
        "reaches it, for every method.",
    )
    tune: bool = Field(
        default=False, description="Choose each method's learning rate of four on held-out records."
    )
    seeds: int = Field(default=5, description="Runs of each method that are reported.")
    ledger: File | None = Field(
        default=None,
        description="A ledger file that every run is charged on. Default: ledger.jsonl in --out.",
    )
    out: File | None = Field(
        default=None,
        description="A folder for the report, its page and every run; the same command goes on "
        "with a study that was stopped.",
    )


@options_of(Design)
@options_of(
    TrainConfig,
    only=(*SHARED, "train_size", "test_size"),
    forms={
        **OWN_DATA,
        "clip": Form(help="Clipping norm."),
        "lr": Form(help="One learning rate for all. Default: each method's own."),
    },
)
def compare(
    methods: Annotated[str, typer.Option(help="The methods to compare, with commas.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon of one run.")],
    base: TrainConfig,
    design: Design,
    as_json: Json = False,
) -> None:
    """Run every method with every seed, and print the comparison."""
    out = design.out
    names = tuple(name.strip() for name in methods.split(",") if name.strip())
    study = comparison.Study(names, epsilon, base, **dict(design))
    with Console(stderr=True).status("starting") as status:

        def tell(name: str, progress: Progress) -> None:
            steps = f" {progress.step}/{progress.steps}" if progress.steps else ""
            status.update(f"{name}{steps}  ({study.runs} runs)")

        report = comparison.compare(study, tell)
    if as_json:
        print_json(report)
    else:
        console = wide_console()
        console.print(comparison_report.table(report).rich())
        for sentence in comparison_report.words(report, printable(str(out or "OUT"))):
            console.print(sentence, markup=False)
    if out is not None:
        for path in comparison_report.write(report, out):
            typer.echo(f"wrote {path}", err=as_json)
    if report["interrupted"]:
        further = "with --out it could go on" if out is None else "the same command goes on"
        typer.echo(f"vestige: interrupted; the report is of the runs so far; {further}", err=True)
        raise typer.Exit(INTERRUPTED)
