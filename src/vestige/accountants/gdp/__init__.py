"""Opacus' import name: see `vestige.compat.accountants`."""

from vestige.compat.accountants import GaussianAccountant as GaussianAccountant
