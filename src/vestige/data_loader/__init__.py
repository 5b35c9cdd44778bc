"""Opacus' import name: see `vestige.compat.loading`."""

from vestige.compat.loading import DPDataLoader as DPDataLoader
from vestige.compat.refusals import refused

wrap_collate_with_empty = refused("wrap_collate_with_empty")
