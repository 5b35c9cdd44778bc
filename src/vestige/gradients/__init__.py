"""Per-example gradients without materialising them: capture, rules, uses and the collector."""

from __future__ import annotations

from torch import nn

from vestige.geometry import Geometry
from vestige.gradients.capture import Capture
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.dense import DenseCollector
from vestige.gradients.groups import Groups
from vestige.gradients.rules.fallback import Fallback
from vestige.gradients.rules.registry import RULES

__all__ = ["Capture", "capture"]


def capture(
    module: nn.Module,
    groups: Groups,
    clip: Clip,
    batch_first: bool = True,
    geometry: Geometry | None = None,
) -> Capture:
    """The capture of `module`'s clipped sums (or of a geometry's), not yet attached."""
    collector = (
        Collector(groups, clip) if geometry is None else DenseCollector(groups, clip, geometry)
    )
    return Capture(module, collector, RULES, Fallback(module), batch_first)
