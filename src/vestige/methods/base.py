"""What a named method is: a small frozen description that the engine composes its parts from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class Method:
    """A private training method: its parameters, its paper, and its guarantee in one sentence.

    `beta` is the weight of the lot's own clipped sum in the release (1 where nothing is mixed in);
    a release is charged at the noise multiplier divided by it.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = ""
    clipping: ClassVar[str] = "flat"

    @property
    def query_weight(self) -> float:
        """beta: the weight of the clipped sum in the release."""
        return 1.0
