"""Opacus' import name: see `vestige.compat.faces`."""

from vestige.compat.faces import DPOptimizer as DPOptimizer
