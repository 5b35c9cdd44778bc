"""Opacus' import name: see `vestige.compat.accountants`."""

from vestige.compat.accountants import get_noise_multiplier as get_noise_multiplier
