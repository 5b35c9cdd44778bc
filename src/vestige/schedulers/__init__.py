"""Opacus' import name: see `vestige.compat.schedulers`."""

from vestige.compat import schedulers as _all

ExponentialNoise, ExponentialGradClip = _all.ExponentialNoise, _all.ExponentialGradClip
LambdaNoise, LambdaGradClip = _all.LambdaNoise, _all.LambdaGradClip
StepNoise, StepGradClip = _all.StepNoise, _all.StepGradClip
