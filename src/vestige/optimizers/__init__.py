"""Opacus' import name: see `vestige.compat.faces`."""

from vestige.compat.faces import DPOptimizer as DPOptimizer
from vestige.compat.refusals import refused

DistributedDPOptimizer = refused("DistributedDPOptimizer")
DPOptimizerFastGradientClipping = refused("DPOptimizerFastGradientClipping")
FSDPOptimizerFastGradientClipping = refused("FSDPOptimizerFastGradientClipping")
