"""`vestige budget`: what a run costs."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from vestige.checks import check_count, round_up
from vestige.cli.options import Beta, Delta, Groups, Json, Rate, Steps
from vestige.cli.render import print_json
from vestige.privacy import accounting


def budget(
    sample_rate: Rate,
    steps: Steps,
    noise_multiplier: Annotated[
        float | None, typer.Option(help="The joint multiplier, as make_private takes it.")
    ] = None,
    delta: Delta = 1e-5,
    beta: Beta = 1.0,
    group_noise_multiplier: Annotated[
        float | None,
        typer.Option(help="The papers' form instead: the multiplier inside each of --groups."),
    ] = None,
    groups: Groups = 1,
    as_json: Json = False,
) -> None:
    """Print epsilon of that many releases under every accountant."""
    report = accounting.budget(
        sample_rate=sample_rate,
        steps=check_count("steps", steps),
        delta=delta,
        noise_multiplier=noise_multiplier,
        beta=beta,
        group_noise_multiplier=group_noise_multiplier,
        groups=groups,
    )
    if as_json:
        print_json(report)
        return
    marginal = report["marginal_epsilon"]
    table = Table("accountant", "epsilon", title=f"epsilon at delta {report['delta']:g}")
    if marginal:
        table.add_column(f"one group alone\n({report['marginal_note']})")
    for name, value in report["epsilon"].items():
        row = [name, round_up(value, 4)]
        table.add_row(*row, *([round_up(marginal[name], 4)] if marginal else []))
    console = Console()
    console.print(table)
    console.print(f"sigma_eff {report['sigma_eff']:.6g}; guarantee: {report['guarantee']}")
