"""Memory rules: functions from public numbers to the weights of earlier releases.

A rule never sees the releases themselves, let alone a gradient: it reads inner products between
releases and exponents of the weights from a `View` and answers with a `Recall`. The branch is then

    branch_t = (1 - beta_t) * scale_g * sum_j weights[g, j] * s~_(t-j)     in each part g

Guarantee: the branch is a function of the transcript, so every rule, whatever it computes, has the
same accounting: one Gaussian release with multiplier sigma/beta (one proof for all memories).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


@dataclass(frozen=True)
class View:
    """Public numbers about the transcript before step `step`, by part and by lag.

    `gram[g, i, j]` is <s~_(t-1-i), s~_(t-1-j)>, `trend[g, j]` is <s~_(t-1-j), mu>,
    `trend_square[g]` is |mu|^2; `exponents[g]` is the power-law exponent of the group's weights,
    None where it has none.
    """

    step: int
    gram: Array
    trend: Array
    trend_square: Array
    exponents: tuple[float | None, ...] = ()

    @property
    def parts(self) -> int:
        """The number of parts: groups, or one for the whole release."""
        return len(self.trend_square)

    @property
    def lags(self) -> Array:
        """1, 2, ..., as far as releases are kept."""
        return np.arange(1, self.trend.shape[1] + 1, dtype=np.float64)


@dataclass(frozen=True)
class Recall:
    """A rule's answer: weights that sum to 1 over the lags, a scale of each part, and the reasons.

    `facts` are the rule's diagnostics by name, arrays over parts (and lags).
    """

    weights: Array
    scale: Array
    facts: Mapping[str, Any] = field(default_factory=dict)

    def norms(self, view: View) -> Array:
        """The norm of scale * (weighted sum of the releases), from the Gram matrix."""
        return self.scale * mixed_norms(self.weights, view.gram)

    @property
    def depth(self) -> Array:
        """The effective depth: sum_j j * weights[g, j]."""
        depth: Array = self.weights @ np.arange(1, self.weights.shape[1] + 1, dtype=np.float64)
        return depth


class Memory(ABC):
    """A memory rule: `window` releases (the current one included) with the trend's rate `ema`."""

    groupwise: ClassVar[bool] = False  # whether it looks at each group on its own

    window: int
    ema: float = 1.0
    refresh: int | None = None  # the period of the exponents; None where the rule needs none
    estimator: str = "hill"
    debias: bool = False  # whether the known noise is taken off the inner products

    def recall(self, view: View) -> Recall:
        """The weights for the query of step `view.step`."""
        if not isinstance(view, View):
            raise TypeError(
                f"a memory rule reads a View of the releases, not a {type(view).__name__}: what "
                "comes from the current lot must never reach it."
            )
        return self._recall(view)

    @abstractmethod
    def _recall(self, view: View) -> Recall:
        """The rule itself."""


def mixed_norms(weights: Array, gram: Array) -> Array:
    """|sum_j weights[g, j] s~_(t-j)| in each part."""
    squares = (weights[:, None, :] @ gram @ weights[:, :, None])[:, 0, 0]
    norms: Array = np.sqrt(np.maximum(squares, 0))
    return norms


def power_law(lags: Array, alpha: float, tempering: Any) -> Array:
    """The normalised fractional kernel (j+1)^(alpha-1) * exp(-tempering * j), over the last axis.

    It is normalised in logarithms: a strong tempering would let every raw weight underflow to 0.
    """
    logs = (alpha - 1) * np.log(lags + 1) - np.asarray(tempering) * lags
    if lags.size == 0:
        return np.zeros(logs.shape)
    raw = np.exp(logs - logs.max(axis=-1, keepdims=True))
    weights: Array = raw / raw.sum(axis=-1, keepdims=True)
    return weights


@dataclass(frozen=True)
class UniformMemory(Memory):
    """weights = 1 / (number of releases): the FO paper's equation 24, an ablation."""

    window: int

    def _recall(self, view: View) -> Recall:
        lags = view.lags.size
        return Recall(np.full((view.parts, lags), 1 / max(lags, 1)), np.ones(view.parts))


@dataclass(frozen=True)
class ExponentialMemory(Memory):
    """weights proportional to decay^(j-1): the FO paper's equation 26, an ablation."""

    window: int
    decay: float

    def _recall(self, view: View) -> Recall:
        raw = self.decay ** (view.lags - 1)
        weights = raw / max(raw.sum(), 1.0)  # the first weight is 1: the sum is 0 only when empty
        return Recall(np.tile(weights, (view.parts, 1)), np.ones(view.parts))


@dataclass(frozen=True, kw_only=True)
class FractionalMemory(Memory):
    """Fractional memory tempered by the trend of the releases (FO-DP-SGD, equations 4 to 9).

        nu_j    = |s~_(t-j) - mu| / (max(|mu|, min_scale) + eps)       inconsistency
        chi     = |mu| / (|mu| + confidence)
        a_j     = (j+1)^(alpha-1) * exp(-(tempering + chi * inconsistency * nu_j) * j),   normalised

    Paper: FO-DP-SGD, arXiv 2605.09890; lambda = tempering, tau = inconsistency, gamma = ema,
    kappa = min_scale, zeta = confidence.
    """

    window: int
    alpha: float
    tempering: float
    inconsistency: float
    ema: float
    min_scale: float
    confidence: float
    eps: float

    def _recall(self, view: View) -> Recall:
        norm = np.sqrt(np.maximum(view.trend_square, 0))
        squares = np.diagonal(view.gram, axis1=1, axis2=2)
        gaps = squares - 2 * view.trend + view.trend_square[:, None]
        scores = (
            np.sqrt(np.maximum(gaps, 0)) / (np.maximum(norm, self.min_scale) + self.eps)[:, None]
        )
        chi = norm / (norm + self.confidence)
        tempering = self.tempering + chi[:, None] * self.inconsistency * scores
        return Recall(
            power_law(view.lags, self.alpha, tempering),
            np.ones(view.parts),
            {"inconsistency": scores, "confidence": chi},
        )


@dataclass(frozen=True, kw_only=True)
class SpectralMemory(Memory):
    """Fractional memory tempered by the spectrum of the weights (SMA-DP-SGD, Algorithm 1).

        d       = max(0, low - rho, rho - high)                 deviation of the exponent rho
        lambda  = 1 - exp(-tempering * d)
        a_j     = (j+1)^(alpha-1) * exp(-lambda * j),           normalised; nu = sum_j a_j s~_(t-j)
        Gamma   = max(0, <mu, nu> / (|mu| |nu| + eps))          alignment gate
        Psi     = min(norm_cap, |mu| / (|nu| + eps))            norm scale
        omega   = 1 - exp(-t / warmup);    branch = (1 - beta) * omega * Gamma * Psi * nu

    Paper: SMA-DP-SGD, arXiv 2605.20450; c_lambda = tempering, gamma_ema = ema, tau_warm = warmup,
    xi_max = norm_cap, I_rho = interval.

    `fixed` replaces lambda by a constant; `shuffle` is the seed of a permutation that gives each
    group another group's exponent. Both are ablations.
    """

    groupwise: ClassVar[bool] = True

    window: int
    alpha: float
    interval: tuple[float, float]
    tempering: float
    ema: float
    warmup: float
    norm_cap: float
    eps: float
    estimator: str = "hill"
    refresh: int | None = 1
    fixed: float | None = None
    shuffle: int | None = None
    debias: bool = False

    def _recall(self, view: View) -> Recall:
        rho = self._exponents(view)
        deviation = np.array([self._deviation(r) for r in rho])
        tempering = 1 - np.exp(-self.tempering * deviation)
        if self.fixed is not None:
            tempering = np.full(view.parts, self.fixed)
        weights = power_law(view.lags, self.alpha, tempering[:, None])
        gate, scale = self._gate(weights, view)
        warmup = 1 - math.exp(-view.step / self.warmup)
        facts = {
            "rho": np.array(rho, dtype=object),
            "deviation": deviation,
            "tempering": tempering,
            "gate": gate,
            "scale": scale,
            "warmup": np.full(view.parts, warmup),
        }
        return Recall(weights, warmup * gate * scale, facts)

    def _gate(self, weights: Array, view: View) -> tuple[Array, Array]:
        """Gamma and Psi."""
        trend = np.sqrt(np.maximum(view.trend_square, 0))
        memory = mixed_norms(weights, view.gram)
        inner = (weights * view.trend).sum(1)
        # The products are rounded, so the cosine of two parallel vectors may come out above 1.
        gate = np.clip(inner / (trend * memory + self.eps), 0, 1)
        scale = np.minimum(self.norm_cap, trend / (memory + self.eps))
        # Before the first release there is nothing to gate: both are 0, as the paper sets them.
        return (gate, scale) if weights.size else (np.zeros_like(gate), np.zeros_like(scale))

    def _deviation(self, rho: float | None) -> float:
        low, high = self.interval
        return 0.0 if rho is None else max(0.0, low - rho, rho - high)

    def _exponents(self, view: View) -> list[float | None]:
        rho = list(view.exponents) or [None] * view.parts
        if self.shuffle is not None:
            known = [g for g, r in enumerate(rho) if r is not None]
            for g, source in zip(known, shuffled(known, self.shuffle), strict=True):
                rho[g] = view.exponents[source]
        return rho


def shuffled(items: list[int], seed: int) -> list[int]:
    """A fixed random permutation that leaves no item in its place (Sattolo's single cycle)."""
    generator, items = np.random.default_rng(seed), list(items)
    for i in range(len(items) - 1, 0, -1):
        j = int(generator.integers(i))
        items[i], items[j] = items[j], items[i]
    return items
