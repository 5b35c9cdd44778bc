"""Opacus' import name: see `vestige.compat.accountants`."""

from vestige.compat.accountants import get_noise_multiplier

__all__ = ["get_noise_multiplier"]
