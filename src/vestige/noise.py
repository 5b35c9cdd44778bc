"""The noise of a plan: its standard deviation in every group, for every step or step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vestige.accounting import joint_multiplier
from vestige.errors import ConfigError
from vestige.schedule import Schedule, is_number, needs_steps, plain, tabulate

GroupNoise = Sequence[float] | Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class NoiseScale:
    """The noise of a plan: its standard deviation in each group, and the joint multiplier.

    `joint` is relative to the joint sensitivity sqrt(sum_g C_g^2) and is what the accountant sees
    (divided by the gain); `stds` are the standard deviations on the coordinates of each group.
    """

    joint: float
    stds: tuple[float, ...]

    @classmethod
    def shared(cls, noise_multiplier: float, bounds: Sequence[float]) -> NoiseScale:
        """The same standard deviation, noise_multiplier * sqrt(sum C_g^2), everywhere."""
        _check_multiplier("noise_multiplier", noise_multiplier)
        std = noise_multiplier * math.sqrt(sum(c * c for c in bounds))
        return cls(noise_multiplier, (std,) * len(bounds))

    @classmethod
    def by_group(
        cls, multipliers: Sequence[float], bounds: Sequence[float], names: Sequence[str]
    ) -> NoiseScale:
        """The papers' form: sigma_g * C_g inside group g; joint 1/sqrt(sum sigma_g^-2)."""
        multipliers = plain(multipliers)
        if not isinstance(multipliers, tuple):
            raise ConfigError(
                f"group_noise_multipliers={multipliers!r} must be a sequence with one number for "
                f"each group; in order they are: {', '.join(names)}."
            )
        if len(multipliers) != len(bounds):
            raise ConfigError(
                f"group_noise_multipliers has {len(multipliers)} values for {len(bounds)} groups; "
                f"in order they are: {', '.join(names)}."
            )
        for sigma in multipliers:
            _check_multiplier("group_noise_multipliers", sigma)
        stds = tuple(s * c for s, c in zip(multipliers, bounds, strict=True))
        return cls(joint_multiplier(multipliers), stds)


def _check_multiplier(name: str, value: float) -> None:
    if not is_number(value) or value < 0:
        raise ConfigError(
            f"{name}={value} must be zero or a positive finite number: it is the noise's standard "
            "deviation in units of the sensitivity (0 switches privacy off, for tests)."
        )


def shaped(scales: list[NoiseScale], shape: Sequence[float] | None) -> list[NoiseScale]:
    """The scales multiplied by a method's public shape, step by step."""
    if shape is None:
        return scales
    for scale in scales:
        _check_multiplier("noise_multiplier", scale.joint * max(shape))
    return [
        NoiseScale(scale.joint * f, tuple(std * f for std in scale.stds))
        for t, f in enumerate(shape)
        for scale in [scales[min(t, len(scales) - 1)]]
    ]


def noise_scales(
    noise_multiplier: Schedule | None,
    group_noise_multipliers: GroupNoise | None,
    bounds: Sequence[float],
    names: Sequence[str],
    steps: int | None,
) -> list[NoiseScale]:
    """The noise of every step: one scale where it is constant, or else one for each of `steps`."""
    if (noise_multiplier is None) == (group_noise_multipliers is None):
        raise ConfigError(
            f"noise_multiplier={noise_multiplier} and group_noise_multipliers="
            f"{group_noise_multipliers}: give exactly one of them."
        )
    if callable(group_noise_multipliers):
        name = "group_noise_multipliers"
        return [
            NoiseScale.by_group(group_noise_multipliers(t), bounds, names)
            for t in range(needs_steps(name, steps))
        ]
    if group_noise_multipliers is not None:
        return [NoiseScale.by_group(group_noise_multipliers, bounds, names)]
    assert noise_multiplier is not None
    table = tabulate(
        "noise_multiplier",
        noise_multiplier,
        steps,
        lambda value: _check_multiplier("noise_multiplier", value),
    )
    return [NoiseScale.shared(m, bounds) for m in (table if isinstance(table, tuple) else (table,))]
