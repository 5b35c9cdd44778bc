"""DP-SGD: clip each example's gradient, add up, add Gaussian noise, take the optimizer's step.

    release = sum_{i in lot} clip_C(g_i) + N(0, sigma^2 C^2 I);    gradient = release / batch size

Paper: Abadi et al. 2016, arXiv 1607.00133.
Guarantee: each release is a Poisson-subsampled Gaussian mechanism with noise multiplier sigma;
epsilon is their composition. Whatever the optimizer does with a release is post-processing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vestige.methods.base import AT_SIGMA, Method


@dataclass(frozen=True)
class DPSGD(Method):
    """DP-SGD with any torch optimizer. Proven: Poisson-subsampled Gaussian at multiplier sigma."""

    name: ClassVar[str] = "dp-sgd"
    paper: ClassVar[str] = "Abadi et al. 2016, arXiv 1607.00133"
    guarantee: ClassVar[str] = AT_SIGMA
    summary: ClassVar[str] = "clipped sums with Gaussian noise; any torch optimizer"


@dataclass(frozen=True)
class CurrentOnly(DPSGD):
    """DP-SGD by the name that it has in the FO paper's ablation of memories (equation 23)."""

    name: ClassVar[str] = "current-only"
    summary: ClassVar[str] = "dp-sgd by the FO paper's name"
