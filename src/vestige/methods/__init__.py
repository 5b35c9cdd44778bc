"""The named methods. `method="fo"` or an instance such as `methods.FO(beta=0.8)`.

`METHODS` is the catalogue, which needs no torch; classes are imported when they are used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from vestige.methods.catalogue import METHODS, MethodInfo, register

if TYPE_CHECKING:
    from vestige.methods.adam import (
        ADPAdamW,
        DPAdam,
        DPAdamAC,
        DPAdamACPrivate,
        DPAdamBC,
        DPAdamW,
        DPAdamWBC,
    )
    from vestige.methods.correlated import DPFTRL, BandedInverse, FractionalNoise
    from vestige.methods.geodp import GeoDP, GeoDPBox, GeoDPTangent
    from vestige.methods.memories import (
        FO,
        SMA,
        Doppler,
        Exponential,
        Kalman,
        PostFM,
        SMAFixed,
        SMAShuffled,
        Uniform,
    )
    from vestige.methods.method import (
        Method,
        charged_weight,
        planned_charges,
        query_weight,
        resolve,
        share,
    )
    from vestige.methods.sgd import DPIS, DPSGD, CurrentOnly
    from vestige.methods.sharpness import DPSAM, DPSAT, Disk, DPSAMPerExample, DPSATMomentum

__all__ = [
    "DPFTRL",
    "DPIS",
    "DPSAM",
    "DPSAT",
    "DPSGD",
    "FO",
    "METHODS",
    "SMA",
    "ADPAdamW",
    "BandedInverse",
    "CurrentOnly",
    "DPAdam",
    "DPAdamAC",
    "DPAdamACPrivate",
    "DPAdamBC",
    "DPAdamW",
    "DPAdamWBC",
    "DPSAMPerExample",
    "DPSATMomentum",
    "Disk",
    "Doppler",
    "Exponential",
    "FractionalNoise",
    "GeoDP",
    "GeoDPBox",
    "GeoDPTangent",
    "Kalman",
    "Method",
    "MethodInfo",
    "PostFM",
    "SMAFixed",
    "SMAShuffled",
    "Uniform",
    "charged_weight",
    "planned_charges",
    "query_weight",
    "register",
    "resolve",
    "share",
]
_HOMES = {str(info.home).partition(":")[2]: info for info in METHODS.values()}


def __getattr__(name: str) -> Any:
    """A method's class by its home in the catalogue, or what method.py has."""
    if name in _HOMES:
        return _HOMES[name].load()
    if name in __all__:
        return getattr(importlib.import_module("vestige.methods.method"), name)
    raise AttributeError(f"module 'vestige.methods' has no attribute {name!r}")
