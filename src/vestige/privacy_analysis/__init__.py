"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("privacy_analysis", "epsilon of releases is vestige.accounting.epsilon")
