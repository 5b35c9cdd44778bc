"""The command `vestige verify`: the checks of Vestige's own methods for your method. Thin."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from vestige.checks import round_down, round_up
from vestige.cli.options import Json
from vestige.cli.render import print_json, wide_console

if TYPE_CHECKING:
    from vestige.audit.verify import Report, Verdict

_TRIALS, _FEWEST = 4000, 100


def verify(
    target: Annotated[
        str,
        typer.Argument(
            metavar="MODULE:FACTORY",
            help="A function without arguments that returns a vestige Method, or a Method class. "
            "The module is looked for in the current folder first.",
        ),
    ],
    trials: Annotated[
        int, typer.Option(min=_FEWEST, help="Number of canaries of the audit.")
    ] = _TRIALS,
    seed: Annotated[
        int | None,
        typer.Option(help="Repeatable lots, noise and canaries. Default: fresh ones."),
    ] = None,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer releases and at most 1000 canaries: less can be seen."),
    ] = False,
    as_json: Json = False,
) -> None:
    """Replay, measure and attack a method of your own; exit code 1 if anything is found."""
    from vestige.audit import verify as room

    method = room.load(target)
    with Console(stderr=True, quiet=as_json).status("starting") as status:
        verdict = room.verify(method, trials=trials, seed=seed, quick=quick, tell=status.update)
    if as_json:
        print_json(verdict.as_dict())
    else:
        _print(verdict)
    if not verdict.passed:
        raise typer.Exit(1)


def _print(verdict: Verdict) -> None:
    table = Table(title=f"verify {escape(verdict.method)}")
    for heading in ("check", "verdict", "seen"):
        table.add_column(heading, no_wrap=heading != "seen")
    for report in verdict.reports:
        table.add_row(report.check, _verdict(report), escape(_seen(report)))
    wide_console(120).print(table)
    for report in verdict.reports:
        for finding in report.findings:
            typer.echo(f"{report.check}: {finding}")
    passed = sum(report.passed for report in verdict.reports)
    seconds = f"{verdict.seconds:.0f} seconds"
    if verdict.passed:
        typer.echo(f"nothing was found ({seconds}): this is no proof; see docs/verify.md")
    else:
        typer.echo(f"{passed} of {len(verdict.reports)} checks passed ({seconds})")


def _verdict(report: Report) -> str:
    if report.findings:
        return "FAILED"
    return "does not apply" if report.not_applicable else "passed"


def _seen(report: Report) -> str:
    """The figures of a report in a few words."""
    if report.not_applicable:
        return report.not_applicable
    figures: Any = report.figures
    if report.check == "claim" and "guarantee" in figures:
        charged = "charged as planned; " if report.passed else ""
        return f"{charged}it says: {figures['guarantee']}"
    if report.check == "replay" and figures:
        looks = sum(one["looks"] for one in figures.values())
        used = max(one["largest_move"] for one in figures.values())
        return f"{looks} looks at lots; one record moved a query by {used:.3f} of its bound"
    if report.check == "rows" and figures:
        moved = figures["largest_move"]
        return f"{figures['models']} models; one record moved a sum by {moved:.3f} of its bound"
    if report.check == "noise" and figures:
        rate = figures["false_alarm_rate"]
        return (
            f"{figures['numbers']:,} numbers of {figures['releases']} releases, {figures['tests']} "
            f"tests, false alarms {rate:g}"
        )
    if report.check == "lots" and figures:
        drawn, charged = figures["rate_drawn"], figures["rate_charged"]
        return f"drawn at rate {drawn:.4f}, charged {charged:.4f}; {figures['charges']} charges"
    if report.check == "audit" and figures:
        family = figures["epsilon_lower_family"]
        free = round_down(figures["epsilon_lower"])
        claimed = round_up(figures["epsilon_claimed"])
        return (
            f"epsilon at least {free} (family {round_down(family)}), claimed {claimed}; "
            f"{figures['trials']} canaries"
        )
    return ""
