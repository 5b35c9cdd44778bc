"""Which records a rank has, as a digest that ranks compare."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import ConcatDataset, Subset, TensorDataset

_MOST = 2**30  # bytes of a Hugging Face data set that are read


def order_of(dataset: Any) -> tuple[str, bool]:
    """A digest of which records a data set has, in order, and whether it follows from all of them.

    Of a data set that does not show its records only the number goes in; of a Subset of it also
    which it takes.
    """
    digest, whole = hashlib.sha256(), True
    for part in _shown(dataset):
        whole = whole and part is not None
        digest.update(hashlib.sha256(b"" if part is None else part).digest())
    return digest.hexdigest(), whole


def _shown(dataset: Any) -> Iterator[Any]:
    """Bytes that tell which records there are; None for what is not shown."""
    files = getattr(dataset, "samples", None)  # of torchvision's folders
    if isinstance(dataset, Subset):
        yield from _inner([dataset.dataset])
        yield np.asarray(dataset.indices).tobytes()
    elif isinstance(dataset, ConcatDataset):
        yield from _inner(dataset.datasets)
    elif isinstance(dataset, TensorDataset):
        for tensor in dataset.tensors:
            yield tensor.detach().contiguous().view(-1).view(torch.uint8).cpu().numpy().data
    elif isinstance(files, list) and all(map(_is_plain, files)):
        yield repr(files).encode()
    elif hasattr(getattr(dataset, "data", None), "to_batches"):
        yield from _columns(dataset)
    else:
        yield str(len(dataset)).encode()
        yield None


def _inner(datasets: Any) -> Iterator[Any]:
    for digest, whole in map(order_of, datasets):
        yield digest.encode()
        if not whole:
            yield None


def _is_plain(one: Any) -> bool:
    return isinstance(one, tuple) and all(isinstance(x, str | int) for x in one)


def _columns(dataset: Any) -> Iterator[Any]:
    """A Hugging Face data set: its columns, and which of their rows it has, where not all."""
    if dataset.data.nbytes > _MOST:
        yield None
    else:
        yield from (batch.serialize() for batch in dataset.data.to_batches())
    chosen = getattr(dataset, "_indices", None)
    yield from () if chosen is None else (batch.serialize() for batch in chosen.to_batches())
