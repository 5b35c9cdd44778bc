"""`vestige calibrate`: the noise for an epsilon."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Annotated, Any

import typer
from rich.console import Console

from vestige.checks import check_count, round_up
from vestige.cli.budget import check_groups
from vestige.cli.options import Accountant, Beta, Delta, Groups, Json, Rate, Steps
from vestige.cli.render import pairs, print_json
from vestige.privacy import accounting


def calibrate(
    epsilon: Annotated[float, typer.Option(help="The epsilon to stay within.")],
    sample_rate: Rate,
    steps: Steps,
    delta: Delta = 1e-5,
    beta: Beta = 1.0,
    groups: Groups = 1,
    accountant: Accountant = "pld",
    as_json: Json = False,
) -> None:
    """Print the noise multiplier that keeps a run within epsilon."""
    target = (epsilon, delta, sample_rate, check_count("steps", steps))
    report = solved(*target, beta=beta, groups=groups, accountant=accountant)
    if as_json:
        print_json(report)
        return
    table = pairs()
    joint = round_up(report["noise_multiplier"], 6)
    table.add_row("noise multiplier", f"{joint}  (joint: for train)")
    if report["groups"] > 1:
        per_group = round_up(report["group_noise_multiplier"], 6)
        table.add_row("in each group", f"{per_group}  ({report['groups']} groups)")
    reached = f"{round_up(report['epsilon'], 4)} at delta {report['delta']:g}"
    table.add_row("epsilon reached", f"{reached}  ({report['accountant']})")
    Console().print(table)


def solved(
    epsilon: float,
    delta: float,
    sample_rate: float,
    steps: int,
    *,
    beta: float = 1.0,
    groups: int = 1,
    accountant: str = "pld",
) -> dict[str, Any]:
    """The noise for a target, jointly and in each of `groups` that share it equally.

    Guarantee: that of `accounting.calibrate`.
    """
    groups = check_groups(groups)
    calibration = accounting.calibrate(epsilon, delta, sample_rate, steps, accountant, beta)
    noise = calibration.noise_multiplier
    return {
        **asdict(calibration),
        "group_noise_multiplier": noise * math.sqrt(groups),
        "sigma_eff": noise / beta,
        "groups": groups,
    }
