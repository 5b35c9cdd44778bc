"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("utils.module_utils", "nothing is wrapped, so model.named_parameters() is enough")
