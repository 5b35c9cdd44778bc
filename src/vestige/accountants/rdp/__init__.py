"""Opacus' import name: see `vestige.compat.accountants`."""

from vestige.compat.accountants import RDPAccountant as RDPAccountant
