"""One loss per row from what a Hugging Face model returns: its own loss is a mean over the batch.

A row's loss is the mean over the row's own labels; those that are -100 (padding, prompts, tokens
that were not masked) have no part in it, and a row without labels has the loss 0. The model's own
loss divides by the labels of all rows, so that one record moves the gradients of the others.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.errors import ConfigError

IGNORED = -100
_WHOLE = {f"For{what}Classification" for what in ("Sequence", "Image", "Video", "Audio")}
_TOKENS = {"ForCausalLM", "ForMaskedLM", "ForTokenClassification", "ForConditionalGeneration"}


def row_losses(kind: str | None, logits: Tensor, labels: Tensor, smoothing: float = 0.0) -> Tensor:
    """The losses of the rows; `kind` is the `loss_type` of the model.

    Guarantee: a row's loss depends on that row's logits and labels alone.
    """
    if kind in _WHOLE and labels.is_floating_point():
        return _of_numbers(logits, labels)
    if kind == "ForCausalLM":
        logits, labels = logits[:, :-1], labels[:, 1:]
    if kind not in _WHOLE | _TOKENS or logits.shape[:-1] != labels.shape:
        raise ConfigError(
            f"no loss per row is known for a model with loss_type={kind!r}, logits of shape "
            f"{tuple(logits.shape)} and labels of shape {tuple(labels.shape)}: give "
            "compute_loss_func=f, where f(outputs, labels, num_items_in_batch) returns one loss "
            "per row."
        )
    each = F.cross_entropy(
        logits.float().movedim(-1, 1),
        labels,
        ignore_index=IGNORED,
        reduction="none",
        label_smoothing=smoothing,
    )
    if each.ndim == 1:
        return each
    return each.flatten(1).sum(1) / (labels != IGNORED).flatten(1).sum(1).clamp(min=1)


def _of_numbers(logits: Tensor, labels: Tensor) -> Tensor:
    """Labels that are numbers: regression, or several classes that hold independently."""
    if logits.shape[-1] == 1 or labels.ndim == 1:
        return F.mse_loss(logits.float().flatten(1).mean(1), labels.flatten(), reduction="none")
    return F.binary_cross_entropy_with_logits(logits.float(), labels, reduction="none").mean(1)


def logits_in(outputs: Any) -> Tensor:
    """The logits of a model's output."""
    logits = outputs.get("logits") if isinstance(outputs, dict) else None
    if not isinstance(logits, torch.Tensor):
        raise ConfigError(
            f"the model returned no logits but {type(outputs).__name__}: give compute_loss_func=f, "
            "where f(outputs, labels, num_items_in_batch) returns one loss per row."
        )
    return logits
