"""Rules for embeddings: a row of the table for every index, or the sum of a bag of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor

from vestige.errors import UnsupportedModel
from vestige.gradients.refs import Ref
from vestige.gradients.rows import Rows
from vestige.gradients.rules.base import Uses, rule
from vestige.gradients.uses import LookedUp, Use

if TYPE_CHECKING:
    from vestige.gradients.capture import Capture


@rule(F.embedding)
def embedding(
    capture: Capture,
    _: Any,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    **options: Any,
) -> Any:
    """A row of the table for every index. (torch names all options beyond the table.)"""
    w = capture.find(weight)
    if not w:
        return NotImplemented
    limited = options.get("max_norm") is not None
    if limited or options.get("scale_grad_by_freq"):
        option = "max_norm" if limited else "scale_grad_by_freq"
        raise UnsupportedModel(
            f"embedding {w.slot.name!r} uses {option}, which depends on the other examples of "
            "the batch: build the layer without it."
        )
    rows = capture.rows_in(input, [w], "embedding", channels=0)
    if rows is None:
        return _shared_lookup(capture, w, input, padding_idx)
    indices = capture.saved(input)
    out = F.embedding(input, w.value, padding_idx)
    after = Rows(rows.stride * out.shape[-1], rows.batch, rows.order)

    def uses(g: Tensor) -> Uses:
        return [w.use(_looked_up(rows.first(indices()), capture.by_row(g, after), w, padding_idx))]

    out = capture.tap(out, [w], uses)
    capture.tracker.give(out, after)
    return out


def _looked_up(indices: Tensor, g: Tensor, w: Ref, padding_idx: int | None) -> LookedUp:
    """The table's use at (n, ...) indices; the padding has no gradient."""
    size = w.value.shape[0]
    if padding_idx is not None:
        g = g.masked_fill((indices == padding_idx % size).unsqueeze(-1), 0)
    return LookedUp(indices, g, size)


def _shared_lookup(capture: Capture, w: Ref, indices: Tensor, padding_idx: int | None) -> Tensor:
    """The same rows of the table for every example, such as position embeddings."""

    def attribute(use: Use) -> Use:
        g = use.dense()
        return _looked_up(indices.expand(g.shape[0], *indices.shape), g, w, padding_idx)

    return capture.share(w, F.embedding(indices, w.value, padding_idx), attribute)


@rule(F.embedding_bag)
def embedding_bag(
    capture: Capture,
    _: Any,
    input: Tensor,
    weight: Tensor,
    mode: str = "mean",
    per_sample_weights: Tensor | None = None,
    padding_idx: int | None = None,
    **options: Any,
) -> Any:
    """The sum or mean of the table's rows at (rows, positions) indices."""
    w = capture.find(weight)
    if w and input.ndim == 1:
        raise UnsupportedModel(
            f"embedding bag {w.slot.name!r} is given the indices of all records in one axis, with "
            "offsets, where no record has a row of its own: give it (rows, positions), padded to a "
            "public length, and build it with padding_idx."
        )
    if not w or mode == "max":
        return NotImplemented
    with capture:  # whatever follows from indices has their rows
        looked = F.embedding(
            input,
            weight,
            padding_idx,
            max_norm=options.get("max_norm"),
            scale_grad_by_freq=options.get("scale_grad_by_freq", False),
        )
        if per_sample_weights is not None:
            looked = looked * per_sample_weights.unsqueeze(-1)
        if padding_idx is None:
            return looked.sum(1) if mode == "sum" else looked.mean(1)
        kept = input != padding_idx % len(w.value)
        total = looked.masked_fill(~kept.unsqueeze(-1), 0).sum(1)
        return total if mode == "sum" else total / kept.sum(1, keepdim=True).clamp(min=1)
