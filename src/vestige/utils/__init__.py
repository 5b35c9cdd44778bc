"""Opacus' import names: see `vestige.compat.loading`."""
