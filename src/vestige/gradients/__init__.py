"""Per-example gradients without materialising them: capture, rules, uses and the collector."""

from __future__ import annotations

from torch import nn

from vestige.clipping import Clip
from vestige.geometry import Geometry
from vestige.gradients.capture import Batch, Capture
from vestige.gradients.collector import Collector
from vestige.gradients.dense import DenseCollector
from vestige.gradients.fallback import Fallback
from vestige.gradients.rules import RULES
from vestige.groups import Groups

__all__ = ["Batch", "Capture", "capture"]


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
