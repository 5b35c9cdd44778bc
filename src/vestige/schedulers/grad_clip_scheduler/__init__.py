"""Opacus' import name: see `vestige.compat.schedulers`."""

from vestige.compat.schedulers import ExponentialGradClip, LambdaGradClip, StepGradClip

__all__ = ["ExponentialGradClip", "LambdaGradClip", "StepGradClip"]
