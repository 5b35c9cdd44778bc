"""The noise of a plan: its multiplier in every group, for every step or step by step."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vestige.checks import is_number, plain
from vestige.errors import ConfigError
from vestige.plan import Schedule, needs_steps, tabulate
from vestige.privacy.events import Event

GroupNoise = Sequence[float] | Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class NoiseScale:
    """The noise of a step relative to the clip bounds, whatever these are at that step.

    `joint` is relative to the joint sensitivity sqrt(sum_g C_g^2) and is what the accountant sees
    (divided by the gain). With `multipliers`, each group has noise of its own.
    """

    joint: float
    multipliers: tuple[float, ...] | None = None

    def stds(self, bounds: Sequence[float]) -> tuple[float, ...]:
        """The standard deviation on the coordinates of each group, for these clip bounds."""
        if self.multipliers is None:
            return (self.joint * math.sqrt(sum(c * c for c in bounds)),) * len(bounds)
        return tuple(s * c for s, c in zip(self.multipliers, bounds, strict=True))

    def scaled(self, factor: float) -> NoiseScale:
        """The noise multiplied by a public factor."""
        each = self.multipliers
        return NoiseScale(self.joint * factor, each and tuple(s * factor for s in each))

    @classmethod
    def shared(cls, noise_multiplier: float) -> NoiseScale:
        """The same standard deviation, noise_multiplier * sqrt(sum C_g^2), everywhere."""
        _check_multiplier("noise_multiplier", noise_multiplier)
        return cls(noise_multiplier)

    @classmethod
    def evenly(cls, noise_multiplier: float, parts: int) -> NoiseScale:
        """The multiplier sqrt(parts) * noise_multiplier in each part: jointly noise_multiplier."""
        _check_multiplier("noise_multiplier", noise_multiplier)
        return cls(noise_multiplier, (math.sqrt(parts) * noise_multiplier,) * parts)

    @classmethod
    def by_group(cls, multipliers: Sequence[float], names: Sequence[str]) -> NoiseScale:
        """The papers' form: sigma_g * C_g inside group g; joint 1/sqrt(sum sigma_g^-2)."""
        multipliers = plain(multipliers)
        if not isinstance(multipliers, tuple):
            raise ConfigError(
                f"group_noise_multipliers={multipliers!r} must be a sequence with one number for "
                f"each group; in order they are: {', '.join(names)}."
            )
        if len(multipliers) != len(names):
            raise ConfigError(
                f"group_noise_multipliers has {len(multipliers)} values for {len(names)} groups; "
                f"in order they are: {', '.join(names)}."
            )
        for sigma in multipliers:
            _check_multiplier("group_noise_multipliers", sigma)
        return cls(joint_multiplier(multipliers), multipliers)


def joint_multiplier(group_noise_multipliers: Sequence[float]) -> float:
    """The multiplier of releasing all groups at once: 1 / sqrt(sum sigma_g^-2).

    One record may reach the clipping norm of every group in the same step, and the groups share
    one Poisson draw, so the joint release is exactly one subsampled Gaussian with this multiplier
    (the norm of the whitened difference is sqrt(sum sigma_g^-2)). Zero if any group has no noise.
    """
    sigmas = [Event(1.0, sigma).noise_multiplier for sigma in group_noise_multipliers]
    if not sigmas:
        raise ConfigError("group_noise_multipliers is empty: give one multiplier per group")
    smallest = min(sigmas)
    if smallest == 0 or smallest == math.inf:
        return smallest
    # Relative to the smallest, so that no square over- or underflows.
    return smallest / math.sqrt(math.fsum((smallest / sigma) ** 2 for sigma in sigmas))


def _check_multiplier(name: str, value: float) -> None:
    if not is_number(value) or value < 0:
        raise ConfigError(
            f"{name}={value!r} must be zero or a positive finite number: it is the noise's "
            "standard deviation in units of the sensitivity (0 switches privacy off, for tests)."
        )


def shaped(scales: list[NoiseScale], shape: Sequence[float] | None) -> list[NoiseScale]:
    """The scales multiplied by a method's public shape, step by step."""
    if shape is None:
        return scales
    for scale in scales:
        _check_multiplier("noise_multiplier", scale.joint * max(shape))
    return [scales[min(t, len(scales) - 1)].scaled(f) for t, f in enumerate(shape)]


def noise_scales(
    noise_multiplier: Schedule | None,
    group_noise_multipliers: GroupNoise | None,
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
            NoiseScale.by_group(group_noise_multipliers(t), names)
            for t in range(needs_steps(name, steps))
        ]
    if group_noise_multipliers is not None:
        return [NoiseScale.by_group(group_noise_multipliers, names)]
    assert noise_multiplier is not None
    table = tabulate(
        "noise_multiplier",
        noise_multiplier,
        steps,
        lambda value: _check_multiplier("noise_multiplier", value),
    )
    return [NoiseScale.shared(m) for m in (table if isinstance(table, tuple) else (table,))]
