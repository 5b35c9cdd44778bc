"""Opacus' import name: see `vestige.compat.loading`."""

from vestige.compat.loading import BatchMemoryManager

__all__ = ["BatchMemoryManager"]
