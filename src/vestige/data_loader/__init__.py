"""Opacus' import name: see `vestige.compat.loading`."""

from vestige.compat.loading import DPDataLoader as DPDataLoader
