"""Hugging Face's fused attention, with a padding mask that is always used while a run goes on.

Transformers leaves the mask out where no row of the batch has padding, so that one record would
decide which kernel the others run through. Without a mask given there is nothing to decide.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import nn

_USUAL, _MASKED = "sdpa", "sdpa_always_masked"


def mask_always(module: nn.Module) -> None:
    """Let Hugging Face models inside `module` use the masks that they are given."""
    if "transformers" in sys.modules and any(True for _ in _models(module, _USUAL)):
        _register()
        for model in _models(module, _USUAL):
            model.set_attn_implementation(_MASKED)


def mask_as_usual(module: nn.Module) -> None:
    """The attention that they had."""
    for model in _models(module, _MASKED):
        model.set_attn_implementation(_USUAL)


def _models(module: nn.Module, attention: str) -> Any:
    for part in module.modules():
        config = getattr(part, "config", None)
        sets = callable(getattr(part, "set_attn_implementation", None))
        if sets and getattr(config, "_attn_implementation", None) == attention:
            yield part


def _register() -> None:
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import sdpa_mask

    def masked(**given: Any) -> Any:
        skips = ("allow_is_causal_skip", "allow_is_bidirectional_skip")
        used = given.get("attention_mask") is not None
        return sdpa_mask(**given | (dict.fromkeys(skips, False) if used else {}))

    AttentionInterface.register(_MASKED, sdpa_attention_forward)
    AttentionMaskInterface.register(_MASKED, masked)
