"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.grad_sample import register_grad_sampler as register_grad_sampler
from vestige.grad_sample import register_norm_sampler as register_norm_sampler
