"""Vestige: differentially private PyTorch training that remembers only what it has released."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__all__ = [
    "BudgetExhausted",
    "ConfigError",
    "FlipAndCrop",
    "PadTo",
    "PrivacyEngine",
    "PrivacyError",
    "PrivacyPlan",
    "StorageError",
    "UnsupportedModel",
    "VestigeError",
    "accounting",
    "fix",
    "load",
    "methods",
    "spectrum",
]

if TYPE_CHECKING:
    from vestige import methods
    from vestige.compat.engine import PrivacyEngine
    from vestige.engine.fixing import fix
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
    from vestige.sampling.collate import FlipAndCrop
    from vestige.sampling.padding import PadTo
    from vestige.train.saved_model import load

_HOMES = {
    "FlipAndCrop": "vestige.sampling.collate",
    "PadTo": "vestige.sampling.padding",
    "GradSampleModule": "vestige.grad_sample",
    "PrivacyEngine": "vestige.compat.engine",
    "PrivacyPlan": "vestige.plan",
    "fix": "vestige.engine.fixing",
    "load": "vestige.train.saved_model",
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
# Where Opacus' users look things up; see vestige.compat.
_OPACUS = ("accountants", "data_loader", "distributed", "grad_sample", "layers", "optimizers")
_MODULES |= {
    name: f"vestige.{name}"
    for name in (*_OPACUS, "privacy_analysis", "schedulers", "utils", "validators")
}


def __getattr__(name: str) -> Any:
    """Import on first use: `vestige budget` needs no torch, and torch takes seconds to import."""
    if name in _MODULES:
        return importlib.import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'vestige' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
