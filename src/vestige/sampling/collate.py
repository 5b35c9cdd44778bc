"""From the records of a batch to its rows: views of each record, the user's collate function, and
blank rows where there is no record.

`augment` is called with the input of one record, and with nothing else. What it returns says how
often it is called:

    K views    a list or tuple of K of an input that is none, or, for a tensor or an array, one
               with one axis more, K long: once
    one view   anything else: K times, once for each view

Guarantee: a record's views depend on that record and on random numbers of its own, which come from
the run's secret key (forward_randomness.py), if `augment` keeps nothing from one call to the next.
A collate function of the user's sees the rows of one unit at a time, so that it cannot move a row
from one unit to another.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import Dataset, default_collate

from vestige.checks import is_whole
from vestige.errors import ConfigError
from vestige.sampling.padding import PadTo


@dataclass(frozen=True)
class Views:
    """`count` views of every record, made by `augment` from its input."""

    augment: Callable[[Any], Any]
    count: int

    def of(self, record: Any) -> list[Any]:
        """The record once for each view: (view, label, ...), or the view where it is its input."""
        if isinstance(record, Mapping):
            raise ConfigError(
                f"augment is given records that are a {type(record).__name__}: which part of them "
                "is the input is not known. Use a data set of (input, label) pairs."
            )
        alone = not isinstance(record, tuple | list)
        views = self._views(record if alone else record[0])
        return views if alone else [(view, *record[1:]) for view in views]

    def _views(self, value: Any) -> list[Any]:
        if self.of_many is not None and isinstance(value, Tensor):
            return list(self.of_many.views(value.unsqueeze(0), self.count))
        first = self.augment(value)
        # A list that is made of a list, such as one of tokens, is one view.
        stacked = isinstance(first, list | tuple) and not isinstance(value, list | tuple)
        arrays = Tensor | np.ndarray
        if isinstance(value, arrays) and isinstance(first, arrays):
            stacked = first.ndim == value.ndim + 1
            if not stacked and first.ndim != value.ndim:
                raise ConfigError(
                    f"augment made a tensor of shape {tuple(first.shape)} of one of shape "
                    f"{tuple(value.shape)}: return one view, with as many axes, or {self.count} "
                    "views stacked, with one axis more."
                )
        if stacked and len(first) != self.count:
            raise ConfigError(
                f"augment returned {len(first)} views stacked, and views={self.count}: return that "
                "many, or one view, with as many axes as the input."
            )
        if stacked:
            return list(first)
        return [first, *(self.augment(value) for _ in range(self.count - 1))]

    @property
    def of_many(self) -> FlipAndCrop | None:
        """What treats many records at once as it would each of them."""
        return self.augment if type(self.augment) is FlipAndCrop else None


class FlipAndCrop:
    """Views of images (channels, height, width): moved by up to `padding` pixels, mirrored or not.

    `make_private(..., views=16, augment=vestige.FlipAndCrop(4))`. What moves in from outside is the
    image's own mirrored edge. With `mix` the second half of an image's views are mixtures of two
    different ones of the first half, at weights from Beta(0.2, 0.2): the self-mixup of Bao et al.
    2023, arXiv 2311.01295.

    Guarantee: every view is a function of one image and of random numbers of its own.
    """

    def __init__(self, padding: int = 4, flip: bool = True, mix: bool = False) -> None:
        if not is_whole(padding) or padding < 0:
            raise ConfigError(
                f"FlipAndCrop(padding={padding!r}): give how many pixels an image may move, a "
                "whole number of at least 0."
            )
        self._padding, self._flip, self._mix = padding, flip, mix

    def __call__(self, image: Tensor) -> Tensor:
        """One view."""
        if self._mix:
            raise ConfigError(
                f"{type(self).__name__}(mix=True) is called for one view, and mixtures are made of "
                "several: hand FlipAndCrop itself to augment, or leave mix out."
            )
        return self._moved(image.unsqueeze(0), 1)[0]

    def views(self, images: Tensor, count: int) -> Tensor:
        """`count` views of each of many images, those of an image one after the other."""
        if not self._mix:
            return self._moved(images, count)
        plain, mixed = count - count // 2, count // 2
        if mixed < 2:
            raise ConfigError(
                f"FlipAndCrop(mix=True) with views={count}: mixtures take two of the other half, "
                "so give at least 4 views."
            )
        moved = self._moved(images, plain).unflatten(0, (-1, plain))
        n, device = len(images), images.device
        pairs = torch.rand(n, mixed, plain, device=device).argsort(2)[..., :2].flatten(1)
        both = moved[torch.arange(n, device=device)[:, None], pairs].unflatten(1, (mixed, 2))
        beta = torch.distributions.Beta(*torch.full((2, n, mixed), 0.2, device=device))
        weights = beta.sample().to(moved.dtype).view(n, mixed, 1, 1, 1)
        mixtures = torch.lerp(both[:, :, 0], both[:, :, 1], weights)
        return torch.cat([moved, mixtures], 1).flatten(0, 1)

    def _moved(self, images: Tensor, count: int) -> Tensor:
        if images.ndim != 4 or min(images.shape[2:]) <= self._padding:
            raise ConfigError(
                f"FlipAndCrop({self._padding}) is given an input of shape "
                f"{tuple(images.shape[1:])}: it takes images of shape (channels, height, width) "
                f"that are larger than {self._padding} pixels."
            )
        (n, _, high, wide), device = images.shape, images.device
        around = F.pad(images, [self._padding] * 4, mode="reflect") if self._padding else images
        top, left = torch.randint(0, 2 * self._padding + 1, (2, n * count, 1), device=device)
        across = torch.arange(wide, device=device).expand(n * count, wide)
        if self._flip:
            mirrored = torch.rand(n * count, 1, device=device) < 0.5
            across = torch.where(mirrored, across.flip(1), across)
        source = torch.arange(n, device=device).repeat_interleave(count).view(-1, 1, 1)
        down = (top + torch.arange(high, device=device)).unsqueeze(2)
        views = around[source, :, down, (left + across).unsqueeze(1)]
        return views.permute(0, 3, 1, 2).contiguous()


class Collate:
    """The user's collate function on the views of every record; `rows` blank ones without any."""

    def __init__(
        self,
        dataset: Dataset[Any],
        collate: Callable[[list[Any]], Any],
        views: Views | None = None,
        rows: int = 1,
    ) -> None:
        self._dataset, self._collate, self._views, self._rows = dataset, collate, views, rows

    def __call__(self, records: list[Any]) -> Any:
        if records:
            rows = self._rows_of(records)
            if self._rows == 1 or keeps_order(self._collate):
                return self._collate(rows)
            units = [rows[at : at + self._rows] for at in range(0, len(rows), self._rows)]
            return joined([self._collate(unit) for unit in units], self._rows)
        # The shape of an example is public; its content is replaced and nothing of it is kept.
        return blank(self._collate(self._rows_of([self._dataset[0]] * self._records)))

    @property
    def _records(self) -> int:
        """The records of one unit."""
        return self._rows // (self._views.count if self._views else 1)

    def _rows_of(self, records: list[Any]) -> list[Any]:
        if self._views is None:
            return records
        return [view for record in records for view in self._views.of(record)]


def keeps_order(collate: Callable[[list[Any]], Any]) -> bool:
    """Whether a collate function is known to leave rows in the order in which they come."""
    return collate is default_collate or type(collate) is PadTo


def joined(batches: Sequence[Any], rows: int) -> Any:
    """Batches of `rows` rows each as one, the rows one after the other."""
    first = batches[0]
    shapes = {tuple(b.shape[1:]) for b in batches} if isinstance(first, Tensor | np.ndarray) else ()
    if isinstance(first, Tensor | np.ndarray) and len(shapes) == 1 and first.shape[:1] == (rows,):
        whole = torch.cat if isinstance(first, Tensor) else np.concatenate
        return whole(list(batches))
    if isinstance(first, Mapping):
        return {key: joined([b[key] for b in batches], rows) for key in first}
    if isinstance(first, tuple) and not hasattr(first, "_fields"):
        return tuple(joined(parts, rows) for parts in zip(*batches, strict=True))
    if isinstance(first, list) and all(isinstance(part, Tensor | np.ndarray) for part in first):
        return [joined(parts, rows) for parts in zip(*batches, strict=True)]
    if isinstance(first, list) and len(first) == rows:
        return [value for batch in batches for value in batch]
    raise ConfigError(
        "the collate function is called with the rows of one unit at a time, and what it returns "
        f"for several units cannot be put together ({type(first).__name__}): return tensors with "
        f"{rows} rows of a fixed shape, padded for example by vestige.PadTo."
    )


def blank(batch: Any) -> Any:
    """A batch of the same structure that holds zeros and shares no memory with the original."""
    if isinstance(batch, Tensor):
        return batch.new_zeros(batch.shape)
    if isinstance(batch, np.ndarray):
        return np.zeros_like(batch)
    if isinstance(batch, Mapping):
        return type(batch)({key: blank(value) for key, value in batch.items()})  # type: ignore[call-arg]
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(blank(value) for value in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(blank(value) for value in batch)
    if isinstance(batch, str | bytes | int | float):
        return type(batch)()
    return batch


def tensors_of(batch: Any) -> Iterator[Tensor]:
    """The tensors of a batch, also in dictionaries and objects of other libraries."""
    for leaf in pytree.tree_leaves(batch):
        if isinstance(leaf, Tensor):
            yield leaf
        elif isinstance(leaf, Mapping):
            yield from tensors_of(dict(leaf))
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from (t for t in vars(leaf).values() if isinstance(t, Tensor))


def records_in(batch: Any, rows: int) -> dict[int, int]:
    """The rows of tensors that are one record's each, by their identity: where a batch is a list of
    its records, or has lists of single fields."""
    fields = list(batch.values() if isinstance(batch, Mapping) else _listed(batch))
    columns = [field for field in fields if len(_listed(field)) == rows]
    if len(fields) == rows and not isinstance(batch, Mapping):
        if columns or not all(isinstance(f, list | tuple | Mapping) for f in fields):
            return {}  # as many fields as rows, for all we know
        columns = [fields]
    return {
        id(tensor): row
        for column in columns
        for row, record in enumerate(column)
        for tensor in tensors_of(record)
    }


def _listed(value: Any) -> list[Any] | tuple[Any, ...]:
    return value if isinstance(value, list | tuple) else ()
