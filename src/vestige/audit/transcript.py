"""What the attacker sees: every release, less the memory's branch, as it leaves the door.

The hook wraps `release` and `first_look` of one engine's door, changes nothing, and goes away with
the `with` block. A white-box attacker knows the method and all earlier releases, so it can compute
the branch of a step by itself; here it is taken from the call. The clipped sum is never read.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from vestige.engine.privacy_engine import PrivacyEngine


@dataclass(frozen=True)
class Look:
    """One noisy sum of a lot, without the branch, and the public numbers that belong to it."""

    values: Tensor
    bounds: tuple[float, ...]
    stds: tuple[float, ...]
    gain: float
    counts: tuple[float, ...] | None = None


@dataclass
class Transcript:
    """The looks of every released lot, and the lot's number, in order."""

    lots: list[int] = field(default_factory=list)
    looks: list[list[Look]] = field(default_factory=list)
    _pending: list[Look] = field(default_factory=list)

    def _add(self, look: Look, lot: int | None) -> None:
        self._pending.append(look)
        if lot is not None:
            self.lots.append(lot)
            self.looks.append(self._pending)
            self._pending = []


@contextmanager
def listening(engine: PrivacyEngine) -> Iterator[Transcript]:
    """Everything that `engine` releases inside the block."""
    door: Any = engine._attached().door
    transcript = Transcript()

    def heard(original: Callable[..., Any], ends_lot: bool) -> Callable[..., Any]:
        names = inspect.signature(original)

        def wrapped(*args: Any, **options: Any) -> Any:
            given = names.bind(*args, **options).arguments
            # Before the call: a broken door may write to it.
            branch = given.get("branch")
            known = None if branch is None else branch.values.clone()
            release = original(*args, **options)
            values = release.values.clone()
            if known is not None:
                values -= known
            lot = given.get("lot")
            look = Look(
                values,
                given["clipped"].bounds,
                release.stds,
                given.get("gain", 1.0),
                getattr(release, "counts", None),
            )
            transcript._add(look, (-1 if lot is None else lot) if ends_lot else None)
            return release

        return wrapped

    door.release = heard(door.release, True)
    door.first_look = heard(door.first_look, False)
    try:
        yield transcript
    finally:
        del door.release, door.first_look
