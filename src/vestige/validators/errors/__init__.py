"""Opacus' import name: what is wrong with a model is one kind of error here."""

from vestige.errors import UnsupportedModel

UnsupportedModuleError = ShouldReplaceModuleError = UnsupportedModel
NotYetSupportedModuleError = IllegalModuleConfigurationError = UnsupportedModel
