"""What the methods with a memory share: beta, the window, and no history for a constant beta 1."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from vestige.checks import check_share
from vestige.errors import ConfigError
from vestige.methods.base import Method
from vestige.methods.checks import check_beta, check_count
from vestige.plan import Schedule, tabulate

if TYPE_CHECKING:
    from vestige.memory.base import Memory


MOST = 1024  # the Gram matrix of the releases has window^2 numbers in each group


class RememberingMethod(Method):
    """A method whose query mixes the clipped sum with a memory: beta * sum + branch.

    Not a dataclass itself, so that each method orders its own fields, beta and window among them.
    """

    beta: Schedule
    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)
        if check_count("window", self.window) > MOST:
            raise ConfigError(
                f"window={self.window} is too long: at most {MOST} releases are kept, each of the "
                "size of the model."
            )

    @property
    def query_weight(self) -> Schedule:
        """beta: the weight of the clipped sum in the release."""
        return self.beta

    def tabulated(self, steps: int | None) -> Method:
        """The method with its beta as a number or a table."""
        check = partial(check_share, "beta")
        table: dict[str, Any] = {"beta": tabulate("beta", self.beta, steps, check)}
        return replace(self, **table)

    def memory(self, steps_per_epoch: int) -> Memory | None:
        """The rule; none where nothing would ever be recalled (window 1, or a constant beta 1)."""
        if self.window == 1 or self.beta == 1:
            return None
        return self._rule(steps_per_epoch)

    @abstractmethod
    def _rule(self, steps_per_epoch: int) -> Memory:
        """The memory rule of this method."""
