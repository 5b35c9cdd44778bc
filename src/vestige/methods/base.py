"""What a named method is: a small frozen description that the engine composes its parts from."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from vestige.schedule import Schedule, plain

if TYPE_CHECKING:
    from vestige.memory.base import Memory


@dataclass(frozen=True)
class Method:
    """A private training method: its parameters, its paper, and its guarantee in one sentence.

    `query_weight` (beta) is the weight of the lot's own clipped sum in the release, 1 where nothing
    is mixed in; a release is charged at the noise multiplier divided by it.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = ""
    clipping: ClassVar[str] = "flat"
    filters_releases: ClassVar[bool] = False  # the memory acts after the release, not in the query

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))

    @property
    def query_weight(self) -> Schedule:
        """beta: the weight of the clipped sum in the release."""
        return 1.0

    @property
    def share(self) -> Schedule:
        """The weight of the lot's own sum beside the memory, in the query or after the release."""
        return self.query_weight

    def tabulated(self, steps: int | None) -> Method:
        """The method with its schedules as tables: each is evaluated here, and only here."""
        return self

    def memory(self, steps_per_epoch: int) -> Memory | None:
        """The method's memory rule, if it has one."""
        return None

    def settings(self) -> dict[str, Any]:
        """The parameters as plain JSON types."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
