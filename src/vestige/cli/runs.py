"""`vestige resume` and `vestige ledger`: going on with a run, and what was spent on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vestige.checks import finite, round_up
from vestige.cli.display import Display, print_json, print_result
from vestige.errors import ConfigError
from vestige.privacy import accounting, ledger_file
from vestige.statement.escaping import one_line, printable
from vestige.train import training
from vestige.train.run_folder import LEDGER

_Json = Annotated[bool, typer.Option("--json", help="Print JSON alone on stdout.")]
_Delta = Annotated[float, typer.Option(help="The delta of (epsilon, delta).")]
INTERRUPTED = 130
SEEDED = "a run in test mode is on it, and nothing holds towards whoever knows its seed"


def register(app: typer.Typer) -> None:
    """Add the commands to the program."""
    app.command()(resume)
    ledger = typer.Typer(help="What was spent on the data: show a ledger, or merge several.")
    ledger.command("show")(show)
    ledger.command("merge")(merge)
    app.add_typer(ledger, name="ledger")


def resume(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="The folder of a run.")],
    noise_seed: Annotated[
        int | None,
        typer.Option(help="Test mode: the run's noise seed, where its secret file is gone."),
    ] = None,
    ledger: Annotated[
        Path | None, typer.Option(help="The ledger file that the run shares with others.")
    ] = None,
    as_json: _Json = False,
) -> None:
    """Continue a run that was killed or interrupted; of a finished one, print the result."""
    with Display(quiet=as_json) as display:
        result = training.resume(run, progress=display, noise_seed=noise_seed, ledger=ledger)
    finish(result, as_json, ledger)


def finish(result: dict[str, Any], as_json: bool, ledger: Path | None = None) -> None:
    """Print the result of a run; one that was interrupted ends with exit code 130."""
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


def show(
    path: Annotated[Path, typer.Argument(help="A ledger file, or the folder of a run.")],
    delta: _Delta = 1e-5,
    as_json: _Json = False,
) -> None:
    """What each run has spent, and epsilon of everything together."""
    found = summary(_file(path), delta)
    if as_json:
        print_json(found)
        return
    for run in found["runs"]:
        about = run["about"]
        what = one_line(about.get("method") or "merged ledgers")
        typer.echo(f"run {one_line(run['run'])}: {what}, {run['releases']} releases")
        for event in run["events"]:
            typer.echo(
                f"  {event['count']} at sampling rate {event['sample_rate']:.6g}, "
                f"noise multiplier {event['noise_multiplier']}"
            )
    for name, value in found["epsilon"].items():
        typer.echo(f"epsilon by {name} at delta {delta:g}: {round_up(value)}")
    seeded = f"; {SEEDED}" if found["test_mode"] else ""
    typer.echo(f"guarantee: {one_line(found['guarantee'])}{seeded}")


def merge(
    paths: Annotated[list[Path], typer.Argument(help="Ledger files, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="The ledger file to make.")],
    delta: _Delta = 1e-5,
    as_json: _Json = False,
) -> None:
    """Compose the spending of several runs on the same data into a new ledger."""
    ledger_file.merge_files([_file(path) for path in paths], out)
    show(out, delta, as_json)


def summary(path: Path, delta: float) -> dict[str, Any]:
    """A ledger file as plain JSON types, with epsilon under every accountant."""
    content = ledger_file.read(path)
    if not content.runs:
        raise ConfigError(
            f"the ledger {str(path)!r} is empty: no run was opened on it, or it was emptied. Give "
            "the ledger.jsonl of a run."
        )
    epsilons = {
        name: accounting.epsilon(content.events, delta, name) for name in accounting.ACCOUNTANTS
    }
    return {
        "ledger": str(path),
        "delta": delta,
        "releases": sum(event.count for event in content.events),
        "epsilon": {name: finite(value) for name, value in epsilons.items()},
        "guarantee": accounting.guarantee(epsilons["pld"], content.facts.adjacency),
        "test_mode": content.facts.test_mode,
        "runs": [
            {
                "run": run.run,
                "about": run.about,
                "sessions": run.openings,
                "releases": sum(event.count for event in run.events),
                "events": [event.as_json() for event in run.events],
            }
            for run in content.runs.values()
        ],
    }


def _file(path: Path) -> Path:
    if not path.is_dir():
        return path
    if not (path / LEDGER).exists():
        raise ConfigError(
            f"{str(path)!r} has no {LEDGER}: give a ledger file or the folder of a run."
        )
    return path / LEDGER
