"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("dp_model_inspector", "vestige.validators.ModuleValidator takes its place")
