"""DP-Adam and DP-AdamW: the release divided by the lot is Adam's gradient.

    m <- b1 m + (1 - b1) g,  v <- b2 v + (1 - b2) g^2,  theta <- theta - lr m^ / (sqrt(v^) + eps)

AdamW adds decoupled weight decay. v is mostly noise when the noise dominates: see dp-adambc.

Paper: the standard construction; AdamW: Chooi et al. 2025, arXiv 2511.07843.
Guarantee: that of DP-SGD at sigma: moments are functions of releases.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from vestige.methods.base import AT_SIGMA, Method

if TYPE_CHECKING:
    from torch.optim import Optimizer


class _AdamFamily(Method):
    """What the four share."""

    guarantee: ClassVar[str] = AT_SIGMA
    extra_memory: ClassVar[str] = "2 x parameters (Adam's own)"
    default_lr: ClassVar[float] = 0.01


@dataclass(frozen=True)
class DPAdam(_AdamFamily):
    """Adam on releases. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-adam"
    paper: ClassVar[str] = "standard; see Tang et al. 2024, arXiv 2312.14334"
    summary: ClassVar[str] = "Adam on releases"

    def optimizer_class(self) -> type[Optimizer]:
        """torch.optim.Adam."""
        import torch

        return torch.optim.Adam


@dataclass(frozen=True)
class DPAdamW(_AdamFamily):
    """AdamW on releases. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-adamw"
    paper: ClassVar[str] = "Chooi et al. 2025, arXiv 2511.07843"
    summary: ClassVar[str] = "Adam on releases with decoupled weight decay"

    def optimizer_class(self) -> type[Optimizer]:
        """torch.optim.AdamW."""
        import torch

        return torch.optim.AdamW


@dataclass(frozen=True)
class DPAdamBC(_AdamFamily):
    """Adam with the noise taken out of its second moment. Proven: subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-adambc"
    paper: ClassVar[str] = "Tang et al. 2024, arXiv 2312.14334"
    summary: ClassVar[str] = "Adam whose second moment is corrected by the known noise"
    default_lr: ClassVar[float] = 0.001  # corrected steps are about ten times longer

    def optimizer_class(self) -> type[Optimizer]:
        """vestige.updates.adam.AdamBC."""
        from vestige.updates.adam import AdamBC

        return AdamBC


@dataclass(frozen=True)
class DPAdamWBC(_AdamFamily):
    """DP-AdamBC with decoupled weight decay. Proven: Poisson-subsampled Gaussian at sigma."""

    name: ClassVar[str] = "dp-adamw-bc"
    paper: ClassVar[str] = "Chooi et al. 2025, arXiv 2511.07843"
    summary: ClassVar[str] = "dp-adambc with decoupled weight decay"
    default_lr: ClassVar[float] = 0.001

    def optimizer_class(self) -> type[Optimizer]:
        """vestige.updates.adam.AdamWBC."""
        from vestige.updates.adam import AdamWBC

        return AdamWBC
