"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.compat.refusals import refused

ExponentialNoise, LambdaNoise = refused("ExponentialNoise"), refused("LambdaNoise")
StepNoise, ExponentialGradClip = refused("StepNoise"), refused("ExponentialGradClip")
LambdaGradClip, StepGradClip = refused("LambdaGradClip"), refused("StepGradClip")
