"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.compat.refusals import refused

UniformWithReplacementSampler = refused("UniformWithReplacementSampler")
DistributedUniformWithReplacementSampler = refused("DistributedUniformWithReplacementSampler")
