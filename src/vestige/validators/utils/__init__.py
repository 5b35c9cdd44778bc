"""Opacus' import name: see `vestige.compat.refusals`."""

from vestige.validators import register_module_fixer as register_module_fixer
from vestige.validators import register_module_validator as register_module_validator
