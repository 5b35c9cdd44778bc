"""Opacus' import name: see `vestige.compat.models`."""

from vestige.compat.models import ModuleValidator as ModuleValidator
