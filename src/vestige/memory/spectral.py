"""Fractional memory tempered by the spectrum of the weights (SMA-DP-SGD, Algorithm 1).

    d       = max(0, low - rho, rho - high)                 deviation of the exponent rho
    lambda  = 1 - exp(-tempering * d)
    a_j     = (j+1)^(alpha-1) * exp(-lambda * j),           normalised; nu = sum_j a_j s~_(t-j)
    Gamma   = max(0, <mu, nu> / (|mu| |nu| + eps))          alignment gate
    Psi     = min(norm_cap, |mu| / (|nu| + eps))            norm scale
    omega   = 1 - exp(-t / warmup);    branch = (1 - beta) * omega * Gamma * Psi * nu

Paper: SMA-DP-SGD, arXiv 2605.20450; c_lambda = tempering, gamma_ema = ema, tau_warm = warmup,
xi_max = norm_cap, I_rho = interval.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from vestige.memory.base import Array, Memory, Recall, View, mixed_norms, power_law


@dataclass(frozen=True, kw_only=True)
class SpectralMemory(Memory):
    """The SMA paper's rule, group by group.

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
