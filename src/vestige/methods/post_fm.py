"""Post-FM-DP-SGD: FO's memory after a standard release instead of inside the query.

    release_t = sum_t + N(0, sigma^2 C^2 I)
    update_t  = beta * release_t + (1 - beta) * sum_j a_j release_(t-j)

The weights a_j are FO's, their scores taken over the (sum-level) releases. Step 0 moves by beta
times the release.

Paper: FO-DP-SGD, arXiv 2605.09890, equations 13 to 18: its post-processing baseline.
Guarantee: that of DP-SGD at sigma (not sigma/beta): the memory only filters what was released.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from vestige.methods.base import AT_SIGMA
from vestige.methods.fo import FO, FO_PAPER
from vestige.plan import Schedule


@dataclass(frozen=True)
class PostFM(FO):
    """FO's memory as a filter after DP-SGD. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "post-fm"
    paper: ClassVar[str] = f"{FO_PAPER}, equations 13-18"
    guarantee: ClassVar[str] = AT_SIGMA
    summary: ClassVar[str] = "fractional memory after the release"
    filters_releases: ClassVar[bool] = True

    @property
    def query_weight(self) -> Schedule:
        """1: the release is the standard one."""
        return 1.0

    @property
    def share(self) -> Schedule:
        """beta: the weight of the newest release in the update."""
        return self.beta
