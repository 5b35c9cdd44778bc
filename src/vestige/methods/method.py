"""What a method is: settings, what they cost, and the parts that the engine puts together.

In front of the door a method chooses three strategies: lots, clip and noise. Behind it, it lists
its parts. What does not go together is said by `excludes` and `requires`.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor
from torch.optim import Optimizer

from vestige.checks import check_share, plain
from vestige.errors import ConfigError
from vestige.geometry import Geometry
from vestige.gradients import Capture
from vestige.gradients.clipping import Clip, Clipping, Quantile, split_clipping
from vestige.gradients.groups import Groups
from vestige.memory.history import Keeping
from vestige.methods.catalogue import AMBIGUOUS, METHODS, MethodInfo
from vestige.methods.settings import check_fields
from vestige.plan import PrivacyPlan, Schedule, Table, at, constant, lots_per_epoch, tabulate
from vestige.privacy.accounting import Charge, step_charges
from vestige.release.correlation import Correlation
from vestige.release.door import Distortion, Position
from vestige.release.part import Part
from vestige.sampling.lots import Drawing
from vestige.sampling.streams import Randomness
from vestige.updates.control import ClipControl
from vestige.updates.passes import Passes


class Feature(StrEnum):
    """What a run may have, and a method may not go with."""

    MOVING_CLIP = "automatic or quantile clipping"
    QUANTILE = "quantile clipping"
    GROUPS = "several clipping groups"
    NOISE_SCHEDULE = "a schedule of the noise"
    WORKERS = "workers that read ahead"
    PHYSICAL_BATCHES = "lots in several physical batches"
    NOISE_CORRECTION = "an optimizer that corrects for the known noise"
    DENOISER = "a denoiser after the method"
    DENOISED_CORRECTION = "a denoiser before an optimizer that corrects for the noise"
    HISTORY_DTYPE = "a type for past releases"


FIXED_SENSITIVITY = {
    Feature.MOVING_CLIP: (
        "takes a fixed clip bound, whose sensitivity is known before the run: use clipping='flat' "
        "or 'per_layer'."
    ),
    Feature.NOISE_SCHEDULE: "takes one noise multiplier for the whole run: no schedule.",
}
WHOLE_GRADIENT = {
    Feature.GROUPS: ("looks at the whole gradient, not at {value} groups of it: use flat clipping.")
}
OWN_FILTER = {
    Feature.DENOISER: "filters or scales its releases itself: leave denoiser={value} out."
}
UNKNOWN_NOISE = {
    Feature.NOISE_CORRECTION: (
        "changes the noise after the release, which the correction of {value} does not know: use "
        "another optimizer."
    )
}


@dataclass(frozen=True)
class DrawContext:
    """What the draw of lots and noise may know: public facts and the run's secret streams.

    `like` is a flat buffer with a number for every trainable one.
    """

    like: Tensor
    plan: PrivacyPlan
    randomness: Randomness
    records: int


@dataclass(frozen=True)
class BuildContext(DrawContext):
    """What the parts of a method may know of the run."""

    groups: Groups
    capture: Capture
    optimizer: Optimizer
    position: Position
    clip: Clip
    clip_control: ClipControl | None
    lots: Drawing | None
    keeping: Keeping


@dataclass(frozen=True)
class Method:
    """A private training method: its settings as fields, and what they mean for a run.

    `info` is its row in the catalogue. `query_weight` (beta) is the weight of the lot's own clipped
    sum in the release, 1 where nothing is mixed in; a release is charged at the noise multiplier
    divided by it.
    """

    info: ClassVar[MethodInfo] = MethodInfo(name="")
    clipping: ClassVar[Clipping] = "flat"
    optimizer_class: ClassVar[type[Optimizer] | None] = None  # None: any
    # Why its parts do not work on a rank's shard of a release; "" where they do.
    whole: ClassVar[str] = "was not shown to work on a part of a release"

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))
        check_fields(self)

    @property
    def name(self) -> str:
        """The name in the catalogue."""
        return self.info.name

    @property
    def private(self) -> bool:
        """Whether the method has a guarantee at all."""
        return self.info.private

    @property
    def guarantee(self) -> str:
        """The guarantee in one line."""
        return self.info.guarantee

    @property
    def adjacency(self) -> str:
        """What neighbouring data are."""
        return self.info.adjacency

    # -- what it costs ----------------------------------------------------------------------

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

    # -- what does not go together ----------------------------------------------------------

    def excludes(self) -> Mapping[Feature, str]:
        """What this method does not go with, and what to do instead; {value} is what was given."""
        return {}

    def requires(self) -> Mapping[Feature, str]:
        """What this method needs, and what to do about it."""
        return {}

    # -- the strategies in front of the door ------------------------------------------------

    def geometry(self, like: Tensor) -> Geometry | None:
        """What is released instead of a sum of gradients, if anything is."""
        return None

    def lots(self, context: DrawContext) -> Drawing | None:
        """How lots are drawn; None for Poisson lots."""
        return None

    def clip(self, context: BuildContext) -> Clip:
        """How examples are bounded."""
        return context.clip

    def noise(self, context: DrawContext) -> Correlation | Distortion | None:
        """Noise that is correlated from lot to lot, or a mechanism that is not private at all."""
        return None

    # -- the parts behind it ----------------------------------------------------------------

    @property
    def needs_closure(self) -> bool:
        """Whether a step evaluates its batch twice and so needs optimizer.step(closure)."""
        return False

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """What follows the release, in order."""
        return ()

    def passes(self, context: BuildContext, parts: Sequence[Part]) -> Passes | None:
        """How a step evaluates its closure, where it does so twice."""
        return None

    def make_optimizer(self, parameters: Iterable[Any], lr: float, **more: Any) -> Optimizer:
        """The optimizer that the command line uses: the method's own, or SGD."""
        made: Any = self.optimizer_class or torch.optim.SGD
        optimizer: Optimizer = made(parameters, lr=lr, **more)
        return optimizer

    def check_optimizer(self, optimizer: Optimizer) -> None:
        """Refuse an optimizer of another class where the method owns its update."""
        wanted = self.optimizer_class
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


class WithBeta(Method):
    """What methods with a beta share. Not a dataclass: each orders its own fields."""

    beta: Schedule

    @property
    def query_weight(self) -> Schedule:
        """beta: the weight of the clipped sum in the release."""
        return self.beta

    def tabulated(self, steps: int | None) -> Method:
        """The method with its beta as a number or a table."""
        table: dict[str, Any] = {"beta": _beta_table(self.beta, steps)}
        return replace(self, **table)


def refuse_unknown(method: object) -> NoReturn:
    """Refuse a name that no method has, with the nearest one there is."""
    near: list[str] = []
    if isinstance(method, str):
        # Papers write FO-DP-SGD.
        plain = method.lower().replace("_", "-")
        name = plain.removesuffix("-dp-sgd")
        near = [name] if name in METHODS else difflib.get_close_matches(plain, METHODS, 1)
    words = f"choose from {', '.join(METHODS)}."
    if near:
        words = f"did you mean {near[0]}? `vestige methods` lists them all."
    raise ConfigError(f"method={method!r} is unknown: {words}")


def resolve(method: str | Method, settings: Mapping[str, Any] | None = None) -> Method:
    """A method from its name and its settings, or the instance itself."""
    if isinstance(method, Method):
        return method
    if isinstance(method, str) and method in AMBIGUOUS:
        raise ConfigError(AMBIGUOUS[method])
    if not isinstance(method, str) or method not in METHODS:
        refuse_unknown(method)
    made = METHODS[method].load()
    names = [field.name for field in fields(made)]
    for key in settings or {}:
        if key not in names:
            options = ", ".join(names) or "none"
            raise ConfigError(f"method {method!r} has no setting {key!r}; it has: {options}.")
    return made(**(settings or {}))


def check_together(method: Method, features: Mapping[Feature, Any]) -> None:
    """Refuse what does not go with the method; `features` are those of the run, as given."""
    for feature, reason in method.excludes().items():
        if feature in features:
            words = reason.format(value=features[feature])
            raise ConfigError(f"method {method.name!r} {words}")
    for feature, reason in method.requires().items():
        if feature not in features:
            raise ConfigError(f"method {method.name!r} {reason}")


def query_weight(method: Method, steps: int | None) -> Table:
    """The method's beta in the query, as a number or a table."""
    return _beta_table(method.query_weight, steps)


def share(method: Method, steps: int | None) -> Table:
    """The method's beta beside its memory, in the query or after the release."""
    return _beta_table(method.share, steps)


def charged_weight(method: Method, steps: int | None) -> Table:
    """What the noise multiplier is divided by in a step's charge: beta over the noise's shape."""
    beta, shape = query_weight(method, steps), method.noise_shape(steps)
    if shape is None:
        return beta
    return constant([at(beta, t) / factor for t, factor in enumerate(shape)])


def planned_charges(
    method: Method,
    clipping: Clipping,
    groups: int,
    dataset_size: int,
    batch_size: int,
    rate: Table,
    steps: int,
) -> Counter[Charge]:
    """What a run of `steps` releases will be charged, before its noise is known.

    `rate` is batch_size / dataset_size or what was declared instead, `groups` the number of
    clipping groups. Refuses a method that has no guarantee.
    """
    if not method.info.private:
        raise ConfigError(
            f"method {method.name!r} has no guarantee ({method.info.guarantee}), so no noise "
            "reaches a target epsilon: give a noise multiplier, for study."
        )
    _, form = split_clipping(clipping)
    beside = form.beside(batch_size, groups) if isinstance(form, Quantile) else 0.0
    return method.charges(
        method.charged_rate(rate),
        charged_weight(method, steps),
        steps,
        lots_per_epoch(dataset_size, batch_size),
        beside,
    )


def _beta_table(beta: Schedule, steps: int | None) -> Table:
    return tabulate("beta", beta, steps, lambda value: check_share("beta", value))
