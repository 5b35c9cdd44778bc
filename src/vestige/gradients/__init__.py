"""Per-example gradients without materialising them: capture, rules, uses and the collector."""

from __future__ import annotations

from torch import nn

from vestige.clipping import Clip
from vestige.gradients.capture import Batch, Capture
from vestige.gradients.collector import Collector
from vestige.gradients.fallback import Fallback
from vestige.gradients.rules import RULES
from vestige.groups import Groups

__all__ = ["Batch", "Capture", "capture"]


def capture(module: nn.Module, groups: Groups, clip: Clip, batch_first: bool = True) -> Capture:
    """The capture of `module`'s clipped sums, not yet attached."""
    return Capture(module, Collector(groups, clip), RULES, Fallback(module), batch_first)
