"""Opacus' import name: see `vestige.compat.accountants`."""

from vestige.compat import accountants as names
from vestige.compat.refusals import refused

IAccountant, create_accountant = names.IAccountant, names.create_accountant
PRVAccountant, RDPAccountant = names.PRVAccountant, names.RDPAccountant
GaussianAccountant = GDPAccountant = names.GaussianAccountant
register_accountant = refused("register_accountant")
