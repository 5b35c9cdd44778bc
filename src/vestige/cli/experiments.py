"""The commands about experiments: `vestige reproduce`, `report`, `compare`. Thin, like cli.py."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from vestige.checks import round_up
from vestige.statement.escaping import in_terminal
from vestige.train.config import CLIPPINGS, DATASETS, MODELS, TrainConfig
from vestige.train.training import Progress

_INTERRUPTED = 130
_Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
_Seeds = Annotated[int | None, typer.Option(help="Number of seeds. Default: the experiment's.")]


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(reproduce)
    app.command()(report)
    app.command()(compare)


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
    seeds: _Seeds = None,
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
    as_json: _Json = False,
) -> None:
    """Run a table or figure of the papers; finished rows are kept and never run again."""
    from vestige.lab import catalogue, reporting, runner
    from vestige.lab.progress import best_display
    from vestige.lab.rows import ROWS

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
        _print_json(
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
        raise typer.Exit(_INTERRUPTED)
    if not outcome.complete and not outcome.deadline:
        raise typer.Exit(1)


def _print_list(lines: list[dict[str, Any]], as_json: bool) -> None:
    if as_json:
        _print_json({"experiments": lines})
        return
    table = Table(title="rows: as published, tuning and fair")
    for heading in ("name", "what", "paper", "rows"):
        table.add_column(heading, no_wrap=heading == "name")
    for line in lines:
        counts = f"{line['published']} + {line['tuning']} + {line['fair']}"
        paper = ", ".join(part for part in (line["paper"], line["item"]) if part)
        table.add_row(*map(in_terminal, (line["name"], line["title"], paper, counts)))
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200  # a file or a pipe: nothing needs to be folded
    console.print(table)


def report(
    folder: Annotated[
        Path,
        typer.Argument(
            help="RESULTS/NAME, RESULTS for all experiments in it, or a run folder of train."
        ),
    ],
    as_json: _Json = False,
) -> None:
    """Make tables, plots and report.html: of results from their rows alone, or of a run."""
    from vestige.lab.report.run_data import is_run

    if is_run(folder):
        from vestige.lab.report import write_run

        kind, written = "run", write_run(folder)
    else:
        from vestige.lab import reporting

        kind, written = "experiments", reporting.report(folder)
    if as_json:
        _print_json({"kind": kind, "files": [str(path) for path in written]})
        return
    for path in written:
        typer.echo(f"wrote {path}")


def compare(
    methods: Annotated[str, typer.Option(help="The methods to compare, with commas.")],
    epsilon: Annotated[float, typer.Option(help="The epsilon of one run.")],
    dataset: Annotated[
        str, typer.Option(help=f"{', '.join(DATASETS)}, or the path of an .npz file.")
    ] = TrainConfig.dataset,
    model: Annotated[str | None, typer.Option(help=", ".join(MODELS))] = None,
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
    delta: Annotated[float, typer.Option(help="The delta of (epsilon, delta).")] = (
        TrainConfig.delta
    ),
    accountant: Annotated[str, typer.Option(help="Accountant of epsilon.")] = (
        TrainConfig.accountant
    ),
    lot: Annotated[int | None, typer.Option(help="Expected lot size.")] = None,
    epochs: Annotated[int | None, typer.Option(help="Length of a run. Default: 30.")] = None,
    clip: Annotated[float, typer.Option(help="Clipping norm.")] = 1.0,
    clipping: Annotated[str | None, typer.Option(help=", ".join(CLIPPINGS))] = None,
    lr: Annotated[
        float | None, typer.Option(help="One learning rate for all. Default: each method's own.")
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N.")] = TrainConfig.device,
    data_dir: Annotated[Path | None, typer.Option(help="Folder with NAME.npz.")] = None,
    train_size: Annotated[
        int | None, typer.Option(help="Use the first N training records only.")
    ] = None,
    test_size: Annotated[
        int | None, typer.Option(help="Use the first N held-out records only.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Compare methods on your data at equal privacy, and say what the whole comparison costs."""
    from vestige.lab import comparison

    study = comparison.Study(
        methods=tuple(name.strip() for name in methods.split(",") if name.strip()),
        epsilon=epsilon,
        base=TrainConfig(
            dataset=dataset,
            model=model,
            delta=delta,
            accountant=accountant,
            lot=lot,
            epochs=epochs,
            clip=clip,
            clipping=clipping,
            lr=lr,
            device=device,
            data_dir=data_dir,
            train_size=train_size,
            test_size=test_size,
        ),
        match=match,
        tune=tune,
        seeds=seeds,
    )
    with Console(stderr=True).status("starting") as status:

        def tell(name: str, progress: Progress) -> None:
            steps = f" {progress.step}/{progress.steps}" if progress.steps else ""
            status.update(f"{name}{steps}  ({study.runs} runs)")

        found = comparison.compare(study, tell)
    if as_json:
        _print_json(found)
    else:
        _print_comparison(found)
    if found["interrupted"]:
        typer.echo("vestige: interrupted; the report is of the runs so far", err=True)
        raise typer.Exit(_INTERRUPTED)


def _print_comparison(found: dict[str, Any]) -> None:
    from vestige.lab import comparison

    table = Table(title=f"{found['dataset']}, {found['model']}: accuracy on the held-out split")
    headings = ("method", "lr", "sigma", "epsilon", "accuracy", "95 % interval", "difference", "p")
    for heading in (*headings, "p (Holm)"):
        table.add_column(heading, no_wrap=True)
    for line in found["methods"]:
        accuracy, test = line["accuracy"], line["against_reference"] or {}
        std = "" if accuracy["std"] is None else f" ± {accuracy['std']:.4f}"
        low = accuracy["low"]
        interval = "" if low is None else f"[{low:.4f}, {accuracy['high']:.4f}]"
        difference = f"{test['difference']:+.4f}" if test else ""
        chances = [test.get(name) for name in ("p", "p_holm")]
        table.add_row(
            line["method"],
            f"{line['lr']:g}",
            _noise(line["noise_multiplier"]),
            round_up(line["epsilon"]),
            f"{accuracy['mean']:.4f}{std}",
            interval,
            difference,
            *("" if p is None else f"{p:.3g}" for p in chances),
        )
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    console.print(f"p: paired t test against {found['reference']}", markup=False)
    for sentence in comparison.words(found):
        console.print(sentence, markup=False)


def _noise(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, int | float) else "a schedule"


def _print_json(value: dict[str, Any]) -> None:
    typer.echo(json.dumps(value, indent=2, allow_nan=False))
