"""SMA-DP-SGD: a fractional memory for each layer, tempered by the spectrum of its weights.

    release_t = beta * sum_t + (1 - beta) * omega_t Gamma_t Psi_t nu_(t-1) + N(0, sigma_g^2 C_g^2 I)

in every group g, with the gates of vestige.memory.spectral. A group is a module that owns trainable
parameters; one without a matrix (a norm layer) takes part with tempering 0 and counts in G.

Paper: SMA-DP-SGD, arXiv 2605.20450, Algorithm 1 (c_lambda = tempering, gamma_ema = ema, tau_warm =
warmup, in steps, None for one epoch; xi_max = norm_cap; I_rho = interval). The paper states beta,
alpha, window and interval; the other defaults and the estimator are ours, and so is `debias`, which
takes the known noise off the norms and the cosine before the gates are computed.
Guarantee: given the earlier releases the branch is a constant, so the release of all groups is one
Poisson-subsampled Gaussian with multiplier 1 / (beta * sqrt(sum_g sigma_g^-2)) (equation 19). The
marginal sigma/beta of one group, which the paper plots, is not a guarantee.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from vestige.checks import is_number
from vestige.errors import ConfigError
from vestige.memory.spectrum import check as check_estimator
from vestige.methods.checks import check_count, check_positive, check_share
from vestige.methods.remembering import RememberingMethod
from vestige.plan import Schedule

if TYPE_CHECKING:
    from vestige.memory.base import Memory

SMA_PAPER = "SMA-DP-SGD 2026, arXiv 2605.20450"


@dataclass(frozen=True)
class SMA(RememberingMethod):
    """SMA-DP-SGD. Proven: joint subsampled Gaussian at 1 / (beta sqrt(sum sigma_g^-2))."""

    name: ClassVar[str] = "sma"
    paper: ClassVar[str] = SMA_PAPER
    guarantee: ClassVar[str] = (
        "proven: composition of joint Poisson-subsampled Gaussian releases of all groups at "
        "1/(beta sqrt(sum sigma_g^-2))"
    )
    clipping: ClassVar[str] = "per_layer"
    summary: ClassVar[str] = "memory per layer, tempered by the spectrum of its weights"
    extra_memory: ClassVar[str] = "(window + 1) x parameters"

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
        check_positive("tempering", self.tempering)
        check_share("ema", self.ema)
        if self.warmup is not None:
            check_positive("warmup", self.warmup)
        check_positive("norm_cap", self.norm_cap)
        check_positive("eps", self.eps)
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

    def _rule(self, steps_per_epoch: int) -> Memory:
        return self._spectral(steps_per_epoch)

    def _spectral(self, steps_per_epoch: int, **ablation: Any) -> Memory:
        from vestige.memory.spectral import SpectralMemory

        settings: dict[str, Any] = {
            "estimator": self.estimator,
            "refresh": self.refresh,
            "debias": self.debias,
        } | ablation
        return SpectralMemory(
            window=self.window,
            alpha=self.alpha,
            interval=self.interval,
            tempering=self.tempering,
            ema=self.ema,
            warmup=float(steps_per_epoch if self.warmup is None else self.warmup),
            norm_cap=self.norm_cap,
            eps=self.eps,
            **settings,
        )


@dataclass(frozen=True)
class SMAShuffled(SMA):
    """SMA with every layer's exponent handed to another layer: an ablation. Proven, as SMA."""

    name: ClassVar[str] = "sma-shuffled"
    summary: ClassVar[str] = "sma with the layers' exponents exchanged (ablation)"

    shuffle_seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.shuffle_seed) is not int or self.shuffle_seed < 0:
            raise ConfigError(
                f"shuffle_seed={self.shuffle_seed!r} must be a whole number of at least 0."
            )

    def _rule(self, steps_per_epoch: int) -> Memory:
        return self._spectral(steps_per_epoch, shuffle=self.shuffle_seed)


@dataclass(frozen=True)
class SMAFixed(SMA):
    """SMA with the same tempering lambda for every layer, no spectrum: an ablation. Proven."""

    name: ClassVar[str] = "sma-fixed"
    summary: ClassVar[str] = "sma with one tempering for all layers (ablation)"

    fixed: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not is_number(self.fixed) or self.fixed < 0:
            raise ConfigError(
                f"fixed={self.fixed!r} must be a finite number of at least 0: the tempering lambda "
                "of every layer (SMA's own is in [0, 1))."
            )

    def _rule(self, steps_per_epoch: int) -> Memory:
        return self._spectral(steps_per_epoch, fixed=self.fixed, refresh=None)
