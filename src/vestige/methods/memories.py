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
from typing import Any, ClassVar

from vestige.checks import check_count, check_share, is_number
from vestige.errors import ConfigError
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
    check_non_negative,
    check_positive,
    share,
)
from vestige.plan import Schedule
from vestige.release.part import Part
from vestige.updates.estimated import EstimatedMemory
from vestige.updates.filters import SECOND_ORDER, DopplerFilter, Filter, KalmanFilter

MOST = 1024  # the Gram matrix of the releases has window^2 numbers in each group


class RememberingMethod(WithBeta):
    """A method whose query mixes the clipped sum with a memory of `window` releases."""

    recollection: ClassVar[type[Recollection]] = Recollection

    window: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if check_count("window", self.window) > MOST:
            raise ConfigError(
                f"window={self.window} is too long: at most {MOST} releases are kept, each of the "
                "size of the model."
            )

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
                context.history_dtype,
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

    beta: Schedule = 0.9
    alpha: float = 0.8
    window: int = 8
    tempering: float = 0.0
    inconsistency: float = 0.1
    ema: float = 0.3
    min_scale: float = 1e-6
    confidence: float = 1.0
    eps: float = 1e-12

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("alpha", self.alpha)
        check_non_negative("tempering", self.tempering)
        check_non_negative("inconsistency", self.inconsistency)
        check_share("ema", self.ema)
        for name in ("min_scale", "confidence", "eps"):
            check_positive(name, getattr(self, name))

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

    beta: Schedule = 0.9
    window: int = 8

    def rule(self, steps_per_epoch: int) -> Memory:
        """Equal weights."""
        return UniformMemory(self.window)


@dataclass(frozen=True)
class Exponential(RememberingMethod):
    """Weights decay^(j-1) in the query: the FO paper's equation 26, an ablation; decay is ours."""

    info = METHODS["exponential"]

    beta: Schedule = 0.9
    window: int = 8
    decay: float = 0.7

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.decay) or not 0 < self.decay < 1:
            raise ConfigError(f"decay={self.decay!r} must be strictly between 0 and 1.")

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

    beta: Schedule = 0.95
    alpha: float = 0.7
    window: int = 4
    interval: tuple[float, float] = (2.0, 6.0)
    tempering: float = 1.0
    ema: float = 0.3
    warmup: float | None = None
    norm_cap: float = 1.0
    eps: float = 1e-12
    estimator: str = "hill"
    refresh: int = 1
    debias: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("alpha", self.alpha)
        self._check_interval()
        check_share("ema", self.ema)
        for name in ("tempering", "norm_cap", "eps"):
            check_positive(name, getattr(self, name))
        if self.warmup is not None:
            check_positive("warmup", self.warmup)
        check_estimator(self.estimator)
        check_count("refresh", self.refresh)
        if type(self.debias) is not bool:
            raise ConfigError(f"debias={self.debias!r} must be True or False.")

    def _check_interval(self) -> None:
        interval: Any = self.interval
        pair = isinstance(interval, list | tuple) and len(interval) == 2
        if not pair or not all(is_number(end) for end in interval) or interval[0] > interval[1]:
            raise ConfigError(
                f"interval={interval!r} must be two numbers (low, high) with low <= high: the "
                "exponents that count as reliable, (2, 6) by default."
            )
        object.__setattr__(self, "interval", (float(interval[0]), float(interval[1])))

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

    shuffle_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.shuffle_seed) is not int or self.shuffle_seed < 0:
            raise ConfigError(
                f"shuffle_seed={self.shuffle_seed!r} must be a whole number of at least 0."
            )

    def rule(self, steps_per_epoch: int) -> Memory:
        """The spectral rule with exchanged exponents."""
        return self._spectral(steps_per_epoch, shuffle=self.shuffle_seed)


@dataclass(frozen=True)
class SMAFixed(SMA):
    """SMA with the same tempering lambda for every layer, no spectrum: an ablation."""

    info = METHODS["sma-fixed"]

    fixed: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.fixed) or self.fixed < 0:
            raise ConfigError(
                f"fixed={self.fixed!r} must be a finite number of at least 0: the tempering lambda "
                "of every layer (SMA's own is in [0, 1))."
            )

    def rule(self, steps_per_epoch: int) -> Memory:
        """The spectral rule without spectra."""
        return self._spectral(steps_per_epoch, fixed=self.fixed, refresh=None)


class EstimatingMethod(WithBeta):
    """A method with a filter, which acts after the release or as the memory in the query.

    beta = 1    the optimizer gets the filtered release, charged at sigma
    beta < 1    release = beta * clipped sum + (1 - beta) * estimate + noise, charged at sigma/beta

    Also as `denoiser=` after any method.
    """

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

    order: int = 1
    smoothing: float = 0.3
    beta: Schedule = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_share("smoothing", self.smoothing)
        if type(self.order) is not int or self.order not in (1, 2):
            raise ConfigError(f"order={self.order!r} must be 1 or 2.")

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

    beta: Schedule = 1.0

    def filter(self, context: BuildContext) -> Filter:
        """One gain for each group."""
        return KalmanFilter(context.like, context.groups.segments())
