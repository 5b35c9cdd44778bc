"""The door: the one place where noise is added and private data becomes public.

    release = gain * clipped sum + branch + noise,   noise ~ N(0, std_g^2) on every coordinate of g

The clipped sum is private, the branch a function of earlier releases and of the weights, gain
(beta) and std public. The ledger is charged before the noise is drawn. Nothing else constructs a
`Release`, and everything that comes after (history, memory, optimizers, reports) takes only
`Release` objects, so an un-noised sum cannot get there.

Guarantee: given everything released before, a release is a Gaussian mechanism on the lot with
noise multiplier sigma/gain relative to the clipped sum's sensitivity (Abadi et al. 2016, arXiv
1607.00133; with memory, FO-DP-SGD arXiv 2605.09890 and SMA-DP-SGD arXiv 2605.20450).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vestige.accounting import joint_multiplier
from vestige.errors import ConfigError
from vestige.groups import Groups
from vestige.ledger import Ledger
from vestige.randomness import Randomness

_CERTIFICATE = object()


class ClippedSum:
    """The clipped sum of one lot: private, and useless for anything but a release."""

    __slots__ = ("_values", "bounds")

    def __init__(self, values: Tensor, bounds: tuple[float, ...]) -> None:
        self._values = values
        self.bounds = bounds  # the l2 bound of one example's part in each group: public

    def __repr__(self) -> str:
        return f"ClippedSum(<private>, bounds={self.bounds})"

    def __reduce__(self) -> str:
        raise TypeError("a clipped sum is private and cannot be saved or copied")


class Release:
    """A noisy sum: public, free to use and to publish. Only `Door.release` makes one.

    Its values are readable until the next release: whoever keeps them longer (a history) copies.
    """

    __slots__ = ("_door", "_values", "step")

    def __init__(
        self, values: Tensor, step: int, door: Door | None = None, *, _certificate: object = None
    ) -> None:
        if _certificate is not _CERTIFICATE:
            raise TypeError(
                "a Release can only come out of Door.release: it certifies that noise was added "
                "and the ledger was charged."
            )
        self._values, self.step, self._door = values, step, door

    @property
    def values(self) -> Tensor:
        """The noisy sum, flat."""
        assert self._door is not None
        if self._door.steps != self.step + 1:
            raise RuntimeError("this release's values were overwritten by the next: copy to keep")
        return self._values


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
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(
            f"{name}={value} must be zero or a positive finite number: it is the noise's standard "
            "deviation in units of the sensitivity (0 switches privacy off, for tests)."
        )


class Door:
    """Turns clipped sums into releases, one ledger charge and one noise draw for each."""

    def __init__(
        self,
        groups: Groups,
        noise: NoiseScale,
        sample_rate: float,
        randomness: Randomness,
        ledger: Ledger,
    ) -> None:
        self.noise, self.sample_rate = noise, sample_rate
        self._randomness, self._ledger = randomness, ledger
        self._segments = groups.segments()
        self._buffer: Tensor | None = None
        self.steps = 0

    def charge(self, gain: float = 1.0) -> None:
        """Write the cost of one release into the ledger."""
        self._ledger.charge(self.sample_rate, self.noise.joint / gain)

    def release(
        self, clipped: ClippedSum, branch: Tensor | None = None, gain: float = 1.0
    ) -> Release:
        """Charge the ledger, draw the noise of this step, and let the noisy sum out."""
        if not isinstance(clipped, ClippedSum):
            raise TypeError(f"only a ClippedSum can be released, not {type(clipped).__name__}")
        self.charge(gain)
        total = clipped._values
        if self._buffer is None:
            self._buffer = torch.empty_like(total)  # a fresh one for every step costs page faults
        values = self._buffer
        for block, noise, std in self._noise(total):
            torch.add(
                total[block] if gain == 1 else total[block] * gain,
                noise,
                alpha=std,
                out=values[block],
            )
        if branch is not None:
            values.add_(branch)
        self.steps += 1
        return Release(values, self.steps - 1, self, _certificate=_CERTIFICATE)

    def _noise(self, like: Tensor) -> Iterator[tuple[slice, Tensor, float]]:
        """The step's noise, a block at a time, and the standard deviation still to be applied."""
        stds = self.noise.stds
        if not any(stds):
            yield slice(0, like.numel()), torch.zeros_like(like), 0.0
            return
        for block, noise in self._randomness.normal_blocks(like, self.steps):
            if len(set(stds)) == 1:
                yield block, noise, stds[0]
                continue
            for segment, std in zip(self._segments, stds, strict=True):
                first, last = max(segment.start, block.start), min(segment.stop, block.stop)
                if first < last:
                    noise[first - block.start : last - block.start].mul_(std)
            yield block, noise, 1.0
