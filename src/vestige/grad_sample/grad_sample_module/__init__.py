"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.grad_sample import GradSampleModule as GradSampleModule
