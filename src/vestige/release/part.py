"""Behind the door everything is a part: it sees releases, weights and public numbers.

Memory, ascent, filter, averaging, clip control and rate control are parts in a list. The run walks
the list at the same four moments of every lot and knows none of them by name.

Guarantee: a part is given nothing that depends on the lot at hand but its release, so whatever a
part does is post-processing, and costs nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

import torch
from torch import Tensor

from vestige.checks import check_state
from vestige.release.door import Branch, Release


@dataclass
class Gradient:
    """What the optimizer will get: the release over the batch size, until a part changes it.

    `variances` are those of its noise, group by group. A part that sets `withheld` keeps the
    weights where they are: this release only served as a direction.
    """

    values: Tensor
    batch_size: int
    variances: list[float]
    withheld: bool = False


class Saved:
    """Keeps the attributes named in `saved`: tensors, numbers, tuples, dicts, or its own kind.

    Everything is checked before anything is changed: `load_state_dict` takes what `check_state`
    has let through.
    """

    saved: ClassVar[tuple[str, ...]] = ()
    what: ClassVar[str] = "state"  # in error messages

    def state_dict(self) -> dict[str, Any]:
        """The attributes by name, tensors copied. All of it is public."""
        return {name: _copied(getattr(self, name)) for name in self.saved}

    def check_state(self, state: Any, releases: int) -> None:
        """Refuse a saved state that does not fit, or is not that of a run of `releases`."""
        check_state(self.what, state, self.state_dict())

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state."""
        for name in self.saved:
            setattr(self, name, _restored(state[name], getattr(self, name)))


class Part(Saved):
    """What a method adds behind the door; every moment does nothing unless it is overridden."""

    name: ClassVar[str] = ""  # that its state is saved under
    withholds: ClassVar[bool] = False  # whether some releases leave the weights where they are

    @property
    def branch(self) -> Branch | None:
        """What a memory mixes into the next query."""
        return None

    def lot_begins(self) -> None:
        """A lot is about to be handed out; nobody has seen it yet."""

    def lot_ends(self) -> None:
        """The lot's gradients were taken, or the lot was given up: put back what was moved."""

    def released(self, release: Release, gradient: Gradient) -> None:
        """A release was made; `gradient` may be changed in place."""

    def stepped(self) -> None:
        """The optimizer has moved the weights."""

    def diagnostics(self) -> dict[str, Any]:
        """Public numbers about the last step."""
        return {}


@runtime_checkable
class Survey(Protocol):
    """A pass over all records that releases one number, before every epoch."""

    norm_noise: float
    measuring: bool

    def begin(self, lot: int, measuring: bool) -> None:
        """A lot is handed out: all records, or one like any other."""

    def take_norms(self) -> float:
        """The private number, which is forgotten here."""

    def settle(self, noisy: float) -> None:
        """The number as it was released."""


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    if isinstance(value, Saved):
        return value.state_dict()
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return list(value) if isinstance(value, tuple) else value


def _restored(saved: Any, ours: Any) -> Any:
    """`saved` in the place of `ours`, tensors in place."""
    if isinstance(ours, Saved):
        ours.load_state_dict(saved)
        return ours
    if isinstance(ours, Tensor):
        with torch.no_grad():
            return ours.copy_(saved)
    if isinstance(ours, dict):
        return {key: _restored(saved[key], value) for key, value in ours.items()}
    return type(ours)(saved)
