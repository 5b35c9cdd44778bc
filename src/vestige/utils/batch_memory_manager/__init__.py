"""Opacus' import name: see `vestige.compat.loading`."""

from vestige.compat.loading import BatchMemoryManager as BatchMemoryManager
