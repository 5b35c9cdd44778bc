"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("accountants.analysis", "epsilon of releases is vestige.accounting.epsilon")
