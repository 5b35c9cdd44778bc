"""Which records a rank has, as a digest that ranks compare."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
from torch.utils.data import Subset, TensorDataset


def order_of(dataset: Any) -> str | None:
    """A digest of which records a data set has, in order; None where it does not show them."""
    if isinstance(dataset, Subset):
        inner = order_of(dataset.dataset)
        seen: list[Any] = [inner.encode()] if inner else []
        seen += [np.asarray(dataset.indices).tobytes()] if inner else []
    elif isinstance(dataset, TensorDataset):
        seen = [
            t.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
            for t in dataset.tensors
        ]
    else:  # torchvision's folders
        files = getattr(dataset, "samples", None)
        plain = isinstance(files, list) and all(
            isinstance(one, tuple) and all(isinstance(x, str | int) for x in one) for one in files
        )
        seen = [repr(files).encode()] if plain else []
    if not seen:
        return None
    digest = hashlib.sha256()
    for part in seen:
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()
