"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.compat.refusals import refused

AbstractGradSampleModule = refused("AbstractGradSampleModule")
GradSampleModule = refused("GradSampleModule")
GradSampleModuleFastGradientClipping = refused("GradSampleModuleFastGradientClipping")
GradSampleModuleFastGradientClippingTP = refused("GradSampleModuleFastGradientClippingTP")
register_grad_sampler = refused("register_grad_sampler")
register_norm_sampler = refused("register_norm_sampler")
