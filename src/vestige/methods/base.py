"""What a named method is: a small frozen description that the engine composes its parts from."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from vestige.errors import ConfigError
from vestige.schedule import Schedule, plain

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from vestige.groups import Slot
    from vestige.memory.base import Memory
    from vestige.updates.ascent import Ascent
    from vestige.updates.filters import Filter

AT_SIGMA = "proven: composition of Poisson-subsampled Gaussian releases at sigma"


@dataclass(frozen=True)
class Surroundings:
    """What a method's parts may know of the run: public facts and the parameters' places.

    `like` is a flat buffer in the shape of a release; `stds_of` gives the standard deviations of
    the noise in the groups at a step.
    """

    like: Tensor
    slots: Sequence[Slot]
    segments: Sequence[slice]
    stds_of: Callable[[int], Sequence[float]]


@dataclass(frozen=True)
class Method:
    """A private training method: its parameters, its paper, and its guarantee in one sentence.

    `query_weight` (beta) is the weight of the lot's own clipped sum in the release, 1 where nothing
    is mixed in; a release is charged at the noise multiplier divided by it.
    """

    name: ClassVar[str] = ""
    paper: ClassVar[str] = ""
    guarantee: ClassVar[str] = ""
    summary: ClassVar[str] = ""  # one line for `vestige methods`
    touches: ClassVar[int] = 1  # how often a step looks at its lot
    extra_memory: ClassVar[str] = "none"
    clipping: ClassVar[str] = "flat"
    default_lr: ClassVar[float] = 0.5  # of the command line
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

    def noise_shape(self, steps: int | None) -> tuple[float, ...] | None:
        """What the noise multiplier is multiplied by at each step, at least 1; None for 1."""
        return None

    def tabulated(self, steps: int | None) -> Method:
        """The method with its schedules as tables: each is evaluated here, and only here."""
        return self

    def memory(self, steps_per_epoch: int) -> Memory | None:
        """The method's memory rule, if it has one."""
        return None

    def filter(self, around: Surroundings) -> Filter | None:
        """What stands between the release and the optimizer, if anything does."""
        return None

    def ascent(self, around: Surroundings) -> Ascent | None:
        """What moves the weights before a lot's gradients are taken, if anything does."""
        return None

    def optimizer_class(self) -> type[Optimizer] | None:
        """The one class of optimizer that this method is defined with, or None for any."""
        return None

    def make_optimizer(self, parameters: Iterable[Any], lr: float) -> Optimizer:
        """The optimizer that the command line uses: the method's own, or SGD."""
        import torch

        made: Any = self.optimizer_class() or torch.optim.SGD
        optimizer: Optimizer = made(parameters, lr=lr)
        return optimizer

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer of another class where the method owns its update."""
        wanted = self.optimizer_class()
        if wanted is not None and type(optimizer) is not wanted:
            raise ConfigError(
                f"method {self.name!r} is defined with {wanted.__module__}.{wanted.__name__}, not "
                f"with {type(optimizer).__name__}: pass that optimizer, or method='dp-sgd', which "
                "takes any."
            )

    def settings(self) -> dict[str, Any]:
        """The parameters as plain JSON types."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {k: list(v) if isinstance(v, tuple) else v for k, v in values.items()}
