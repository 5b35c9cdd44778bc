"""`vestige ledger show` and `vestige ledger merge`: what was spent on the data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from vestige.checks import finite, one_line, round_up
from vestige.cli.options import Delta, Json
from vestige.cli.render import print_json
from vestige.errors import ConfigError
from vestige.privacy import accounting, ledger_file
from vestige.train.run_folder import LEDGER

SEEDED = "a run in test mode is on it, and nothing holds towards whoever knows its seed"

ledger = typer.Typer(add_completion=False)


@ledger.command()
def show(
    path: Annotated[Path, typer.Argument(help="A ledger file, or the folder of a run.")],
    delta: Delta = 1e-5,
    as_json: Json = False,
) -> None:
    """What each run has spent, and epsilon of everything together."""
    report = summary(_file(path), delta)
    if as_json:
        print_json(report)
        return
    for run in report["runs"]:
        what = one_line(run["about"].get("method") or "merged ledgers")
        typer.echo(f"run {one_line(run['run'])}: {what}, {run['releases']} releases")
        for event in run["events"]:
            if "selection" in event:
                trials = event["selection"]["trials"]
                typer.echo(
                    f"  {event['count']} private search, eta {event['selection']['eta']:g}, gamma "
                    f"{event['selection']['gamma']:.4g}; a trial releases at most, as [rate, "
                    f"noise multiplier, count], {' or '.join(map(str, trials))}"
                )
                continue
            typer.echo(
                f"  {event['count']} at sampling rate {event['sample_rate']:.6g}, "
                f"noise multiplier {event['noise_multiplier']}"
            )
    for name, value in report["epsilon"].items():
        typer.echo(f"epsilon by {name} at delta {delta:g}: {round_up(value)}")
    seeded = f"; {SEEDED}" if report["test_mode"] else ""
    typer.echo(f"guarantee: {one_line(report['guarantee'])}{seeded}")


@ledger.command()
def merge(
    paths: Annotated[list[Path], typer.Argument(help="Ledger files, or folders of runs.")],
    out: Annotated[Path, typer.Option(help="The ledger file to make.")],
    delta: Delta = 1e-5,
    as_json: Json = False,
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
