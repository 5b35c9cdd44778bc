"""`vestige calibrate`: the noise for an epsilon."""

from __future__ import annotations

import math
from dataclasses import asdict
from typing import Any

from pydantic import Field

from vestige.checks import round_up
from vestige.cli.budget import check_groups
from vestige.cli.options import Beta, Delta, Groups, Json, Rate, Steps, options_of
from vestige.cli.render import print_json, print_pairs
from vestige.privacy import accounting
from vestige.privacy.options import Accountant, Options


class Target(Options):
    """The epsilon that the noise is asked for, and the releases that reach it."""

    epsilon: float = Field(description="The epsilon to stay within.")
    sample_rate: Rate
    steps: Steps
    delta: Delta = 1e-5
    beta: Beta = 1.0
    groups: Groups = 1
    accountant: Accountant = "pld"


@options_of(Target)
def calibrate(target: Target, as_json: Json = False) -> None:
    """Print the noise multiplier that keeps a run within epsilon."""
    report = solved(**dict(target))
    if as_json:
        print_json(report)
        return
    told = [("noise multiplier", f"{round_up(report['noise_multiplier'], 6)}  (joint: for train)")]
    if report["groups"] > 1:
        per_group = round_up(report["group_noise_multiplier"], 6)
        told.append(("in each group", f"{per_group}  ({report['groups']} groups)"))
    reached = f"{round_up(report['epsilon'], 4)} at delta {report['delta']:g}"
    print_pairs(
        [*told, ("epsilon reached", f"{reached}  ({report['accountant']})")], highlight=True
    )


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
