"""Opacus' import name: see `vestige.compat.schedulers`."""

from vestige.compat.schedulers import ExponentialNoise, LambdaNoise, StepNoise

__all__ = ["ExponentialNoise", "LambdaNoise", "StepNoise"]
