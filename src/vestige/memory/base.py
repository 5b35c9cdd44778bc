"""What a memory rule is: a function from public numbers to the weights of earlier releases.

A rule never sees the releases themselves, let alone a gradient: it reads inner products between
releases and exponents of the weights from a `View` and answers with a `Recall`. The branch is then

    branch_t = (1 - beta_t) * scale_g * sum_j weights[g, j] * s~_(t-j)     in each part g

Guarantee: the branch is a function of the transcript, so every rule, whatever it computes, has the
same accounting: one Gaussian release with multiplier sigma/beta (one proof for all memories).
"""

from __future__ import annotations

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
