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

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vestige.groups import Groups
from vestige.ledger import Ledger
from vestige.noise import NoiseScale
from vestige.randomness import Randomness

_CERTIFICATE = object()  # shared with history.py, which certifies branches, and nobody else


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


class Branch:
    """The memory's part of the query of step `step`: a weighted sum of releases, so public.

    Only a `History` makes one. It is valid until the history makes the next.
    """

    __slots__ = ("step", "values")

    def __init__(self, values: Tensor, step: int, *, _certificate: object = None) -> None:
        if _certificate is not _CERTIFICATE:
            raise TypeError(
                "a Branch can only come out of History.mix: it certifies that it was made from "
                "releases alone."
            )
        self.values, self.step = values, step


class Door:
    """Turns clipped sums into releases, one ledger charge and one noise draw for each.

    `noise` is the scale of every step, or one per step, the last of which holds beyond.
    """

    def __init__(
        self,
        groups: Groups,
        noise: NoiseScale | Sequence[NoiseScale],
        randomness: Randomness,
        ledger: Ledger,
    ) -> None:
        self._scales = (noise,) if isinstance(noise, NoiseScale) else tuple(noise)
        self._randomness, self._ledger = randomness, ledger
        self._segments = groups.segments()
        self._buffer: Tensor | None = None
        self.steps = 0

    @property
    def noise(self) -> NoiseScale:
        """The noise of the next release."""
        return self.scale_of(self.steps)

    def scale_of(self, step: int) -> NoiseScale:
        """The noise of release `step`."""
        return self._scales[min(step, len(self._scales) - 1)]

    def charge(self, sample_rate: float, gain: float = 1.0) -> None:
        """Write the cost of one release of a lot drawn with `sample_rate` into the ledger."""
        self._ledger.charge(sample_rate, self.noise.joint / gain)

    def release(
        self,
        clipped: ClippedSum,
        sample_rate: float,
        branch: Branch | None = None,
        gain: float = 1.0,
    ) -> Release:
        """Charge the ledger, draw the noise of this step, and let the noisy sum out."""
        if not isinstance(clipped, ClippedSum):
            raise TypeError(f"only a ClippedSum can be released, not {type(clipped).__name__}")
        if branch is not None:
            self._check_branch(branch)
        self.charge(sample_rate, gain)
        total = clipped._values
        if self._buffer is None:
            self._buffer = torch.empty_like(total)  # a fresh one for every step costs page faults
        values = self._buffer
        for block, noise, std in self._noise(total):
            # The sum comes last or together with the noise, so that whatever interrupts this,
            # the buffer never holds a sum without noise.
            if gain == 1 and branch is None:
                torch.add(total[block], noise, alpha=std, out=values[block])
                continue
            if branch is None:
                torch.mul(noise, std, out=values[block])
            else:
                torch.add(branch.values[block], noise, alpha=std, out=values[block])
            values[block].add_(total[block], alpha=gain)
        self.steps += 1
        return Release(values, self.steps - 1, self, _certificate=_CERTIFICATE)

    def _check_branch(self, branch: Branch) -> None:
        if not isinstance(branch, Branch):
            raise TypeError(
                f"a memory's branch must be a Branch, not a {type(branch).__name__}: only what was "
                "released may be mixed into a query."
            )
        if branch.step != self.steps:
            raise RuntimeError(
                f"the branch was recalled for step {branch.step}, the release is step {self.steps}"
            )

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
