"""Opacus' import name: see `vestige.compat.models`."""

from vestige.compat.models import ModuleValidator
from vestige.compat.refusals import refused

__all__ = ["ModuleValidator", "register_module_fixer", "register_module_validator"]
register_module_validator = refused("register_module_validator")
register_module_fixer = refused("register_module_fixer")
