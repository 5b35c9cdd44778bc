"""Methods that remember: a memory of earlier releases in the query, or after the release.

In the query, release_t = beta * sum_t + branch_t + N(0, sigma^2 C^2 I), where the branch is a
function of earlier releases and of the weights (vestige.memory). Step 0 releases beta * sum_0;
window 1 releases beta * sum_t; beta 1 is DP-SGD, and nothing is kept.

Papers: FO-DP-SGD, arXiv 2605.09890; SMA-DP-SGD, arXiv 2605.20450.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar

from vestige.checks import check_count, is_number
from vestige.memory.recall import Damping, RecallAfter, Recollection
from vestige.memory.rules import (
    ExponentialMemory,
    FractionalMemory,
    Memory,
    SpectralMemory,
    UniformMemory,
)
from vestige.memory.spectrum import check as check_estimator
from vestige.methods.catalogue import METHODS
from vestige.methods.method import (
    OWN_FILTER,
    UNKNOWN_NOISE,
    BuildContext,
    Feature,
    WithBeta,
    share,
)
from vestige.methods.settings import (
    Beta,
    Count,
    Inside,
    NonNegative,
    Positive,
    Share,
    Switch,
    must_be,
)
from vestige.plan import Schedule
from vestige.release.part import Part
from vestige.updates.estimated import EstimatedMemory
from vestige.updates.filters import SECOND_ORDER, DopplerFilter, Filter, KalmanFilter

MOST = 1024  # the Gram matrix of the releases has window^2 numbers in each group
Window = Annotated[
    int,
    check_count,
    must_be(
        f"at most {MOST}: so many releases are kept, each of the size of the model",
        lambda v: v <= MOST,
    ),
]
Interval = Annotated[
    tuple[float, float],
    must_be(
        "two numbers (low, high) with low <= high: the exponents that count as reliable, (2, 6) "
        "by default",
        lambda v: isinstance(v, tuple) and len(v) == 2 and all(map(is_number, v)) and v[0] <= v[1],
    ),
]


class RememberingMethod(WithBeta):
    """A method whose query mixes the clipped sum with a memory of `window` releases."""

    recollection: ClassVar[type[Recollection]] = Recollection
    whole = ""

    window: int

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """The memory; none where nothing is ever recalled (window 1, or a constant beta 1)."""
        if self.window == 1 or self.beta == 1:
            return ()
        return [
            self.recollection(
                self.rule(context.plan.lots_per_epoch),
                context.groups,
                context.like,
                share(self, context.plan.steps),
                context.position,
                context.keeping,
            )
        ]

    @abstractmethod
    def rule(self, steps_per_epoch: int) -> Memory:
        """The memory rule of this method."""

    def _settings_of(self, rule: type[Memory], **others: Any) -> dict[str, Any]:
        """The fields of `rule` that are settings of this method, and `others`."""
        names = {f.name for f in fields(rule)} & {f.name for f in fields(self)}  # type: ignore[arg-type]
        return {name: getattr(self, name) for name in names} | others


@dataclass(frozen=True)
class FO(RememberingMethod):
    """FO-DP-SGD: a fractional memory of the whole release, tempered by its trend.

    The weights are those of `FractionalMemory`, whatever the clipping. The paper (Algorithm 1;
    lambda = tempering, tau = inconsistency, gamma = ema, kappa = min_scale, zeta = confidence)
    states beta, alpha and window; the other defaults are ours.
    """

    info = METHODS["fo"]

    beta: Beta = 0.9
    alpha: Share = 0.8
    window: Window = 8
    tempering: NonNegative = 0.0
    inconsistency: NonNegative = 0.1
    ema: Share = 0.3
    min_scale: Positive = 1e-6
    confidence: Positive = 1.0
    eps: Positive = 1e-12

    def rule(self, steps_per_epoch: int) -> Memory:
        """The fractional rule."""
        return FractionalMemory(**self._settings_of(FractionalMemory))


@dataclass(frozen=True)
class PostFM(FO):
    """FO's memory after a standard release instead of inside the query (equations 13 to 18).

        update_t = beta * release_t + (1 - beta) * sum_j a_j release_(t-j)

    Step 0 moves by beta times the release.
    """

    info = METHODS["post-fm"]
    recollection = RecallAfter

    @property
    def query_weight(self) -> Schedule:
        """1: the release is the standard one."""
        return 1.0

    @property
    def share(self) -> Schedule:
        """beta: the weight of the newest release in the update."""
        return self.beta

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """The memory; a window of one release recalls nothing, and beta remains."""
        return super().parts(context) or [Damping(share(self, context.plan.steps))]

    def excludes(self) -> Mapping[Feature, str]:
        """A second filter, and a correction for noise that the memory has changed."""
        return OWN_FILTER | UNKNOWN_NOISE


@dataclass(frozen=True)
class Uniform(RememberingMethod):
    """The mean of earlier releases in the query: the FO paper's equation 24, an ablation."""

    info = METHODS["uniform"]

    beta: Beta = 0.9
    window: Window = 8

    def rule(self, steps_per_epoch: int) -> Memory:
        """Equal weights."""
        return UniformMemory(self.window)


@dataclass(frozen=True)
class Exponential(RememberingMethod):
    """Weights decay^(j-1) in the query: the FO paper's equation 26, an ablation; decay is ours."""

    info = METHODS["exponential"]

    beta: Beta = 0.9
    window: Window = 8
    decay: Inside = 0.7

    def rule(self, steps_per_epoch: int) -> Memory:
        """Geometric weights."""
        return ExponentialMemory(self.window, self.decay)


@dataclass(frozen=True)
class SMA(RememberingMethod):
    """SMA-DP-SGD: a fractional memory for each layer, tempered by the spectrum of its weights.

    The gates are those of `SpectralMemory`. A group is a module that owns trainable parameters; one
    without a matrix (a norm layer) takes part with tempering 0 and counts in G. The paper
    (Algorithm 1; c_lambda = tempering, gamma_ema = ema, tau_warm = warmup, in steps, None for one
    epoch; xi_max = norm_cap; I_rho = interval) states beta, alpha, window and interval; the other
    defaults and the estimator are ours, and so is `debias`, which takes the known noise off the
    norms and the cosine before the gates are computed.
    """

    info = METHODS["sma"]
    clipping = "per_layer"

    beta: Beta = 0.95
    alpha: Share = 0.7
    window: Window = 4
    interval: Interval = (2.0, 6.0)
    tempering: Positive = 1.0
    ema: Share = 0.3
    warmup: Positive | None = None
    norm_cap: Positive = 1.0
    eps: Positive = 1e-12
    estimator: Annotated[str, lambda _, name: check_estimator(name)] = "hill"
    refresh: Count = 1
    debias: Switch = False

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.interval
        object.__setattr__(self, "interval", (float(low), float(high)))

    def rule(self, steps_per_epoch: int) -> Memory:
        """The spectral rule."""
        return self._spectral(steps_per_epoch)

    def _spectral(self, steps_per_epoch: int, **ablation: Any) -> Memory:
        warmup = float(steps_per_epoch if self.warmup is None else self.warmup)
        settings = self._settings_of(SpectralMemory, warmup=warmup)
        return SpectralMemory(**settings | ablation)


@dataclass(frozen=True)
class SMAShuffled(SMA):
    """SMA with every layer's exponent handed to another layer: an ablation."""

    info = METHODS["sma-shuffled"]

    shuffle_seed: Annotated[
        int, must_be("a whole number of at least 0", lambda v: type(v) is int and v >= 0)
    ] = 0

    def rule(self, steps_per_epoch: int) -> Memory:
        """The spectral rule with exchanged exponents."""
        return self._spectral(steps_per_epoch, shuffle=self.shuffle_seed)


@dataclass(frozen=True)
class SMAFixed(SMA):
    """SMA with the same tempering lambda for every layer, no spectrum: an ablation."""

    info = METHODS["sma-fixed"]

    fixed: NonNegative = 0.0  # the tempering lambda of every layer; SMA's own is in [0, 1)

    def rule(self, steps_per_epoch: int) -> Memory:
        """The spectral rule without spectra."""
        return self._spectral(steps_per_epoch, fixed=self.fixed, refresh=None)


class EstimatingMethod(WithBeta):
    """A method with a filter, which acts after the release or as the memory in the query.

    beta = 1    the optimizer gets the filtered release, charged at sigma
    beta < 1    release = beta * clipped sum + (1 - beta) * estimate + noise, charged at sigma/beta

    Also as `denoiser=` after any method.
    """

    whole = "keeps a filter over whole releases"

    def excludes(self) -> Mapping[Feature, str]:
        """A second filter, or a type for releases that are not kept."""
        if self.beta == 1:
            return OWN_FILTER
        return {
            Feature.HISTORY_DTYPE: (
                "keeps an estimate instead of past releases, so history_dtype={value} does "
                "nothing: leave it out."
            )
        }

    def parts(self, context: BuildContext) -> Sequence[Part]:
        """The filter, after the release or in the query."""
        made = self.filter(context)
        if self.beta == 1:
            return [made]
        beta = share(self, context.plan.steps)
        return [EstimatedMemory(made, context.like, beta, context.position)]

    @abstractmethod
    def filter(self, context: BuildContext) -> Filter:
        """The filter itself."""


@dataclass(frozen=True)
class Doppler(EstimatingMethod):
    """DOPPLER: a low-pass filter of the releases (`DopplerFilter`).

        m_t = (1 - smoothing) m_(t-1) + smoothing * release_t   (order 1), divided by its gain c_t

    Order 2 is the slow low-pass of the authors' code; `smoothing` does not apply to it. A constant
    gradient passes unchanged from step 0 on; smoothing 1 is DP-SGD.

    Paper: Zhang et al., DOPPLER, NeurIPS 2024, arXiv 2408.13460; smoothing 0.3 is ours.
    """

    info = METHODS["doppler"]

    order: Annotated[int, must_be("1 or 2", lambda v: type(v) is int and v in (1, 2))] = 1
    smoothing: Share = 0.3
    beta: Beta = 1.0

    def filter(self, context: BuildContext) -> Filter:
        """The recursion of this order."""
        if self.order == 2:
            return DopplerFilter(context.like, *SECOND_ORDER)
        return DopplerFilter(context.like, (self.smoothing - 1,), (self.smoothing,))


@dataclass(frozen=True)
class Kalman(EstimatingMethod):
    """A steady-state Kalman filter of the releases, one gain per group (`KalmanFilter`)."""

    info = METHODS["kalman"]
    clipping = "per_layer"

    beta: Beta = 1.0

    def filter(self, context: BuildContext) -> Filter:
        """One gain for each group."""
        return KalmanFilter(context.like, context.groups.segments())
