"""Opacus' import name, which has no counterpart here."""

from vestige.compat.refusals import absent

absent("utils.fsdp_utils", "torch's fully_shard(model), then make_private(sharded=True)")
