"""What the methods with a memory share: beta, the window, and no history for a constant beta 1."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING

from vestige.methods.base import Method
from vestige.methods.checks import check_beta, check_count
from vestige.schedule import Schedule

if TYPE_CHECKING:
    from vestige.memory.base import Memory


class RememberingMethod(Method):
    """A method whose query mixes the clipped sum with a memory: beta * sum + branch.

    Not a dataclass itself, so that each method orders its own fields, beta and window among them.
    """

    beta: Schedule
    window: int

    def __post_init__(self) -> None:
        check_beta(self.beta)
        check_count("window", self.window)

    @property
    def query_weight(self) -> Schedule:
        """beta: the weight of the clipped sum in the release."""
        return self.beta

    def memory(self, steps_per_epoch: int) -> Memory | None:
        """The rule; none where nothing would ever be recalled (window 1, or a constant beta 1)."""
        if self.window == 1 or self.beta == 1:
            return None
        return self._rule(steps_per_epoch)

    @abstractmethod
    def _rule(self, steps_per_epoch: int) -> Memory:
        """The memory rule of this method."""
