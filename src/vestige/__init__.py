"""Vestige: differentially private PyTorch training that remembers only what it has released."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BudgetExhausted",
    "ConfigError",
    "PadTo",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyPlan",
    "StorageError",
    "UnsupportedModel",
    "VestigeError",
    "fix",
    "methods",
    "spectrum",
]

if TYPE_CHECKING:
    from vestige import methods, spectrum
    from vestige.engine import PrivacyEngine
    from vestige.errors import (
        BudgetExhausted,
        ConfigError,
        PrivacyError,
        StorageError,
        UnsupportedModel,
        VestigeError,
    )
    from vestige.padding import PadTo
    from vestige.plan import PrivacyPlan
    from vestige.validation import fix

_HOMES = {
    "PadTo": "vestige.padding",
    "PrivacyEngine": "vestige.engine",
    "PrivacyPlan": "vestige.plan",
    "fix": "vestige.validation",
    "BudgetExhausted": "vestige.errors",
    "ConfigError": "vestige.errors",
    "StorageError": "vestige.errors",
    "PrivacyError": "vestige.errors",
    "UnsupportedModel": "vestige.errors",
    "VestigeError": "vestige.errors",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `vestige budget` needs no torch, and torch takes seconds to import."""
    if name in ("methods", "spectrum"):
        return importlib.import_module(f"vestige.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'vestige' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
