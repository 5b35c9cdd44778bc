"""Opacus' import name: see `vestige.compat.accountants`."""

from vestige.compat.accountants import IAccountant as IAccountant
