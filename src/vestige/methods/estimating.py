"""What the denoisers share: the filter acts after the release, or as the memory in the query.

beta = 1    the optimizer gets the filtered release, charged at sigma
beta < 1    release = beta * clipped sum + (1 - beta) * estimate + noise, charged at sigma/beta
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vestige.checks import check_share
from vestige.methods.base import Method, Surroundings
from vestige.methods.checks import check_beta
from vestige.plan import Schedule, tabulate

if TYPE_CHECKING:
    from vestige.updates.filters import Filter


class EstimatingMethod(Method):
    """A method with a filter of its own. Not a dataclass: each method orders its own fields."""

    beta: Schedule

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta(self.beta)

    @property
    def query_weight(self) -> Schedule:
        """beta: the weight of the clipped sum in the release."""
        return self.beta

    def tabulated(self, steps: int | None) -> Method:
        """The method with its beta as a number or a table."""
        table: dict[str, Any] = {
            "beta": tabulate("beta", self.beta, steps, lambda value: check_share("beta", value))
        }
        return replace(self, **table)

    def filter(self, around: Surroundings) -> Filter | None:
        """The filter after the release."""
        return self._make_filter(around) if self.beta == 1 else None

    def query_filter(self, around: Surroundings) -> Filter | None:
        """The filter whose estimate is in the query."""
        return None if self.beta == 1 else self._make_filter(around)

    @abstractmethod
    def _make_filter(self, around: Surroundings) -> Filter:
        """The filter itself."""
