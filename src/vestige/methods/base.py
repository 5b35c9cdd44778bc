"""What a named method is: a small frozen description that the engine composes its parts from."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, ClassVar

from vestige.checks import plain
from vestige.errors import ConfigError
from vestige.plan import ADJACENCY, Schedule, Table
from vestige.privacy.accounting import Charge, step_charges

if TYPE_CHECKING:
    from torch import Tensor
    from torch.optim import Optimizer

    from vestige.geometry import Geometry
    from vestige.gradients import Capture
    from vestige.gradients.clip_forms import Clipping
    from vestige.gradients.groups import Slot
    from vestige.memory.base import Memory
    from vestige.plan import PrivacyPlan
    from vestige.release.correlation import Correlation
    from vestige.release.door import Distortion, Release
    from vestige.sampling.loader import Drawing
    from vestige.sampling.streams import Randomness
    from vestige.updates.ascent import Ascent
    from vestige.updates.clip_control import RawPercentile
    from vestige.updates.filters import Filter
    from vestige.updates.passes import Passes
    from vestige.updates.rate_control import RateControl

AT_SIGMA = "proven: composition of Poisson-subsampled Gaussian releases at sigma"
AT_SIGMA_OVER_BETA = f"{AT_SIGMA}/beta"


@dataclass(frozen=True)
class Surroundings:
    """What a method's parts may know of the run: public facts and the parameters' places.

    `like` is a flat buffer with a number for every trainable one; `randomness` are the run's secret
    streams, for the parts that draw lots or noise.
    """

    like: Tensor
    slots: Sequence[Slot]
    segments: Sequence[slice]
    plan: PrivacyPlan
    randomness: Randomness
    records: int


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
    clipping: ClassVar[Clipping] = "flat"
    default_lr: ClassVar[float] = 0.5  # of the command line
    filters_releases: ClassVar[bool] = False  # the memory acts after the release, not in the query
    private: ClassVar[bool] = True  # False: published as private and not; epsilon is infinite
    fixed_sensitivity: ClassVar[bool] = False  # clip, noise and rate must stay as they are
    flat_only: ClassVar[bool] = False  # defined over the whole gradient, not group by group
    own_gradient: ClassVar[bool] = False  # what reaches the optimizer is no sum plus known noise
    adjacency: ClassVar[str] = ADJACENCY

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

    @property
    def looks(self) -> int:
        """How often a step looks at the same lot through noise."""
        return 1

    @property
    def needs_closure(self) -> bool:
        """Whether a step evaluates its batch twice and so needs optimizer.step(closure)."""
        return False

    @property
    def alternates(self) -> bool:
        """Whether every other lot only says where to climb."""
        return False

    def charged_rate(self, rate: Table) -> Table:
        """The sampling rate that a lot is charged at, from batch_size / dataset_size."""
        return rate

    def charges(
        self, rate: Table, beta: Table, steps: int, lots_per_epoch: int, beside: float
    ) -> Counter[Charge]:
        """What `steps` releases are charged; `rate` is `charged_rate`, `beta` over the noise's
        shape, `beside` as in `Charge`."""
        return step_charges(rate, beta, steps, self.looks, beside)

    def clip_shape(self, steps: int | None) -> tuple[float, ...] | None:
        """What the clip bounds are multiplied by at each step; None for 1."""
        return None

    def noise_shape(self, steps: int | None) -> tuple[float, ...] | None:
        """What the noise multiplier is multiplied by at each step, at least 1; None for 1."""
        return None

    def tabulated(self, steps: int | None) -> Method:
        """The method with its schedules as tables: each is evaluated here, and only here."""
        return self

    def memory(self, steps_per_epoch: int) -> Memory | None:
        """The method's memory rule, if it has one."""
        return None

    def query_filter(self, around: Surroundings) -> Filter | None:
        """The filter whose estimate is the memory in the query, if there is one."""
        return None

    def passes(self, capture: Capture, look: Callable[[], Release], ascent: Any) -> Passes | None:
        """How a step evaluates its closure, where it does so twice."""
        return None

    def geometry(self, like: Tensor) -> Geometry | None:
        """What is released instead of a sum of gradients, if anything is."""
        return None

    def distortion(self, like: Tensor, plan: PrivacyPlan) -> Distortion | None:
        """The mechanism of a method whose noise is not added to the sum."""
        return None

    def correlation(self, around: Surroundings) -> Correlation | None:
        """Noise that is correlated from lot to lot, if it is."""
        return None

    def drawing(self, around: Surroundings) -> Drawing | None:
        """How lots are drawn; None for Poisson lots."""
        return None

    def clip_control(self, bounds: Sequence[float]) -> RawPercentile | None:
        """What moves the clip bound by looking at raw norms, which is not private."""
        return None

    def rate_control(self) -> RateControl | None:
        """What multiplies the learning rate after each release, if anything does."""
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
