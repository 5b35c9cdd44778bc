"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.compat.refusals import refused

DifferentiallyPrivateDistributedDataParallel = refused(
    "DifferentiallyPrivateDistributedDataParallel"
)
__all__ = ["DifferentiallyPrivateDistributedDataParallel"]
