"""`vestige budget`: what a run costs."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field
from rich.console import Console
from rich.table import Table

from vestige.checks import finite, is_whole, round_up
from vestige.cli.options import Beta, Delta, Groups, Json, Rate, Steps, options_of
from vestige.cli.render import print_json
from vestige.errors import ConfigError
from vestige.privacy import accounting
from vestige.privacy.events import Event
from vestige.privacy.options import Options


class Releases(Options):
    """The releases whose epsilon is asked for."""

    sample_rate: Rate
    steps: Steps
    noise_multiplier: float | None = Field(
        default=None, description="The joint multiplier, as make_private takes it."
    )
    delta: Delta = 1e-5
    beta: Beta = 1.0
    group_noise_multiplier: float | None = Field(
        default=None,
        description="The papers' form instead: the multiplier inside each of --groups.",
    )
    groups: Groups = 1


@options_of(Releases)
def budget(releases: Releases, as_json: Json = False) -> None:
    """Print epsilon of that many releases under every accountant."""
    report = costs(**dict(releases))
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


def costs(
    sample_rate: float,
    steps: int,
    delta: float,
    noise_multiplier: float | None = None,
    group_noise_multiplier: float | None = None,
    *,
    beta: float = 1.0,
    groups: int = 1,
) -> dict[str, Any]:
    """Epsilon of `steps` releases under every accountant, at sigma_eff = joint multiplier / beta.

    Either the joint `noise_multiplier` is given, or in the papers' form that of each of `groups`,
    whose joint multiplier is theirs / sqrt(groups).

    Guarantee: "epsilon" holds upper bounds for the joint release (null, and guarantee "none", when
    infinite). "marginal_epsilon" is what one group alone would cost: the figure of the papers, a
    diagnostic, since a reader of the model sees all groups.
    """
    delta, beta, groups = (
        accounting.check_delta(delta),
        accounting.check_beta(beta),
        check_groups(groups),
    )
    joint = _joint_noise(noise_multiplier, group_noise_multiplier, groups)
    own = None if group_noise_multiplier is None else float(group_noise_multiplier)

    def epsilons(multiplier: float) -> dict[str, float | None]:
        event = Event(sample_rate, multiplier / beta, steps)
        return {
            name: finite(accounting.epsilon([event], delta, name))
            for name in accounting.ACCOUNTANTS
        }

    joint_epsilon = epsilons(joint)
    report: dict[str, Any] = {
        "sigma_eff": joint / beta,
        "noise_multiplier": joint,
        "group_noise_multiplier": own,
        "groups": groups,
        "beta": beta,
        "sample_rate": float(sample_rate),
        "steps": steps,
        "delta": delta,
        "epsilon": joint_epsilon,
        "guarantee": "none" if None in joint_epsilon.values() else accounting.GUARANTEE,
        "marginal_epsilon": None,
    }
    if own is not None and groups > 1:
        report["marginal_epsilon"] = epsilons(own)
        report["marginal_note"] = accounting.MARGINAL_NOTE
    return report


def _joint_noise(joint: float | None, of_group: float | None, groups: int) -> float:
    """The multiplier of all groups together, from the one of the two that is given."""
    if (joint is None) == (of_group is None):
        given = "neither" if joint is None else "both"
        raise ConfigError(
            f"{given} of noise_multiplier and group_noise_multiplier given: give exactly one, the "
            "joint multiplier or the multiplier inside each group"
        )
    if of_group is not None:
        return _finite_noise("group_noise_multiplier", of_group) / math.sqrt(groups)
    if groups > 1:
        raise ConfigError(
            f"groups {groups} needs group_noise_multiplier: a joint noise_multiplier already "
            "covers all groups, so leave groups out or give the multiplier of each group"
        )
    return _finite_noise("noise_multiplier", joint)


def check_groups(groups: int) -> int:
    """A number of clipping groups, or ConfigError."""
    rule = "a whole number >= 1: give the number of clipping groups"
    return int(accounting.checked("groups", groups, lambda n: is_whole(n) and n >= 1, rule))


def _finite_noise(name: str, noise: float | None) -> float:
    rule = (
        "a finite number >= 0: give the noise standard deviation divided by the sensitivity "
        "(0 means no privacy)"
    )
    return accounting.checked(name, noise, lambda value: 0 <= value < math.inf, rule)
