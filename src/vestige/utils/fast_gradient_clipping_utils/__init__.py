"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("utils.fast_gradient_clipping_utils", "make_private takes grad_sample_mode='ghost'")
