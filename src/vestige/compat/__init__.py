"""Opacus' names over Vestige's engine: a script runs with `opacus` replaced by `vestige`.

Nothing here touches gradients, noise or the ledger. Arguments are translated, answers are read from
the plan and the ledger, and what would break the guarantee is refused with what to do instead.
"""
