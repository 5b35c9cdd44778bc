"""What goes into the door: a lot's clipped sum, and a memory's branch.

A branch has a proof of its own, which makes nothing but branches: that of a release is in door.py
and stays there.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

_RECALLED = object()  # proves that a Branch was made by `recalled`, and proves nothing else


@dataclass
class Position:
    """Where a run is: the lot at hand, or the next one, and the number of releases so far."""

    lot: int = 0
    release: int = 0


class ClippedSum:
    """The clipped sum of one lot: private, and useless for anything but a release.

    `counts` are, for quantile clipping, the centred counts sum_i b_i, |b_i| <= 1/2, by group.
    `add_up` makes values and counts those of the whole lot, where several processes share it.
    """

    __slots__ = ("_add_up", "_counts", "_values", "bounds")

    def __init__(
        self,
        values: Tensor,
        bounds: tuple[float, ...],
        counts: Tensor | None = None,
        add_up: Callable[[], None] | None = None,
    ) -> None:
        self._values, self._counts, self._add_up = values, counts, add_up
        self.bounds = bounds  # the l2 bound of one example's part in each group: public

    def complete(self) -> None:
        """Add what other processes have of the lot: for the door, once the lot is charged."""
        if self._add_up is not None:
            self._add_up()

    def __repr__(self) -> str:
        return f"ClippedSum(<private>, bounds={self.bounds})"

    def __reduce__(self) -> str:
        raise TypeError("a clipped sum is private and cannot be saved or copied")


class Branch:
    """The memory's part of the query of step `step`: a function of releases, so public.

    Only a memory makes one. It is valid until the memory makes the next.
    """

    __slots__ = ("step", "values")

    def __init__(self, values: Tensor, step: int, *, _certificate: object = None) -> None:
        if _certificate is not _RECALLED:
            raise TypeError(
                "a Branch can only come out of a memory of releases: it certifies that it was made "
                "from releases alone."
            )
        self.values, self.step = values, step


def recalled(values: Tensor, step: int) -> Branch:
    """The branch of `step`, for memories alone: who calls this says that `values` come from
    releases. What it can make is a branch, never a release."""
    return Branch(values, step, _certificate=_RECALLED)


def check_query(clipped: ClippedSum, branch: Branch | None, step: int) -> None:
    """TypeError unless a clipped sum is asked for, beside a branch of this step or none."""
    if not isinstance(clipped, ClippedSum):
        raise TypeError(f"only a ClippedSum can be released, not {type(clipped).__name__}")
    if branch is None:
        return
    if not isinstance(branch, Branch):
        raise TypeError(
            f"a memory's branch must be a Branch, not a {type(branch).__name__}: only what was "
            "released may be mixed into a query."
        )
    if branch.step != step:
        raise RuntimeError(
            f"the branch was recalled for step {branch.step}, the release is step {step}"
        )
