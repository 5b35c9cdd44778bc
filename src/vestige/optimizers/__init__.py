"""Opacus' import name: see `vestige.compat.faces`."""

from vestige.compat.faces import DPOptimizer as DPOptimizer
from vestige.compat.refusals import OPTIMIZERS, refused

globals().update({name: refused(name) for name in OPTIMIZERS if name != "DPOptimizer"})
