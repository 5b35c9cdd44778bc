"""Per-example gradient rules, one file for each family of torch functions."""

from vestige.gradients.rules import (
    attention,
    convolution,
    elementwise,
    embedding,
    linear,
    norms,
    recurrent,
)
from vestige.gradients.rules.base import RULES

__all__ = [
    "RULES",
    "attention",
    "convolution",
    "elementwise",
    "embedding",
    "linear",
    "norms",
    "recurrent",
]
