"""Sharded models: every rank runs the same passes in the same order, or none goes on.

FSDP sends messages in every forward and backward pass, which only fit those of another rank that
runs the same pass. So ranks say what they are about to do before each of them; where they differ,
all stop with an error instead of waiting for each other.
"""

from __future__ import annotations

from enum import IntEnum
from typing import TYPE_CHECKING

from vestige.errors import PrivacyError

if TYPE_CHECKING:
    from vestige.parallel.ranks import Ranks
    from vestige.release.query import Position


class Doing(IntEnum):
    """What a rank is about to do. The capture knows the first four by their numbers."""

    EVALUATING = 0
    TRAINING = 1
    CHECKING = 2
    BACKWARD = 3
    STEPPING = 4
    SAVING = 5


_WORDS = {
    Doing.EVALUATING: "runs the model without gradients",
    Doing.TRAINING: "runs the model on a batch",
    Doing.CHECKING: "checks the model on synthetic rows",
    Doing.BACKWARD: "begins a backward pass",
    Doing.STEPPING: "releases a lot",
    Doing.SAVING: "saves a checkpoint",
}


class Meetings:
    """Called before each pass of a sharded model, on every rank."""

    def __init__(self, ranks: Ranks, position: Position) -> None:
        self._ranks, self._position = ranks, position

    def __call__(self, doing: int) -> None:
        """Go on if all ranks do the same at the same place in the run."""
        place = (doing, self._position.lot, self._position.release)
        for rank, other in enumerate(self._ranks.each_at(place)):
            if other != place:
                raise PrivacyError(
                    f"rank {self._ranks.rank} {_told(place)} where rank {rank} {_told(other)}: a "
                    "sharded model needs all ranks for every pass. Run the same passes in the same "
                    "order on every rank, those of an evaluation or a checkpoint included."
                )


def _told(place: tuple[int, ...]) -> str:
    return f"{_WORDS[Doing(place[0])]} (lot {place[1]}, {place[2]} releases)"
