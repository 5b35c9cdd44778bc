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
    "accounting",
    "fix",
    "methods",
    "spectrum",
]

if TYPE_CHECKING:
    from vestige import methods
    from vestige.engine.fixing import fix
    from vestige.engine.privacy_engine import PrivacyEngine
    from vestige.errors import (
        BudgetExhausted,
        ConfigError,
        PrivacyError,
        StorageError,
        UnsupportedModel,
        VestigeError,
    )
    from vestige.memory import spectrum
    from vestige.plan import PrivacyPlan
    from vestige.privacy import accounting
    from vestige.sampling.padding import PadTo

_HOMES = {
    "PadTo": "vestige.sampling.padding",
    "PrivacyEngine": "vestige.engine.privacy_engine",
    "PrivacyPlan": "vestige.plan",
    "fix": "vestige.engine.fixing",
    "BudgetExhausted": "vestige.errors",
    "ConfigError": "vestige.errors",
    "StorageError": "vestige.errors",
    "PrivacyError": "vestige.errors",
    "UnsupportedModel": "vestige.errors",
    "VestigeError": "vestige.errors",
}
_MODULES = {
    "accounting": "vestige.privacy.accounting",
    "methods": "vestige.methods",
    "spectrum": "vestige.memory.spectrum",
}


def __getattr__(name: str) -> Any:
    """Import on first use: `vestige budget` needs no torch, and torch takes seconds to import."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'vestige' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
