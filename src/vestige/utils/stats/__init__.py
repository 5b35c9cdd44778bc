"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("utils.stats", "engine.diagnostics() shows a memory, and nothing of single lots")
