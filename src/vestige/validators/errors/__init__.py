"""Opacus' import name: what is wrong with a model."""

from vestige.errors import UnsupportedModel

UnsupportedModuleError = UnsupportedModel
