"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.compat.refusals import refused

make_functional = refused("make_functional")
