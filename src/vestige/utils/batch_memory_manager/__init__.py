"""Opacus' import name: see `vestige.compat.loading`."""

from vestige.compat.loading import BatchMemoryManager as BatchMemoryManager
from vestige.compat.refusals import refused

wrap_data_loader = refused("wrap_data_loader")
