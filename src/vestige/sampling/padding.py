"""`PadTo`: rows of one length, whatever the other records of a lot are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import default_collate

from vestige.checks import is_whole
from vestige.errors import ConfigError


class PadTo:
    """A collate function that pads (or cuts) sequences to a fixed, public length.

    `DataLoader(dataset, batch_size=64, collate_fn=vestige.PadTo(128))` takes the place of
    `pad_sequence`, which pads to the longest record of the lot. An example is a tensor, or a tuple,
    list or dict of them; numpy arrays and lists of numbers count as tensors. `length` is one number
    for all fields with an axis, which is their first, or {field: number} for some of them (the
    field's place or key). So is `value`, the number that fills. A longer sequence is refused, or
    cut at the end with `truncate=True`. `collate` joins the rows, as torch does by default.

    Guarantee: the shape of a row depends on that row and on public numbers alone.
    """

    def __init__(
        self,
        length: int | Mapping[Any, int],
        value: float | Mapping[Any, float] = 0,
        truncate: bool = False,
        collate: Callable[[list[Any]], Any] = default_collate,
    ) -> None:
        for number in length.values() if isinstance(length, Mapping) else (length,):
            if not is_whole(number) or number < 1:
                raise ConfigError(
                    f"PadTo(length={length!r}): the length must be a whole number above 0, public "
                    "and at least that of the longest record."
                )
        self._length, self._value, self._truncate = length, value, truncate
        self._collate = collate

    def __call__(self, examples: list[Any]) -> Any:
        """The examples as one batch."""
        return self._collate([self._example(example) for example in examples])

    def _example(self, example: Any) -> Any:
        if isinstance(example, Mapping):
            return {key: self._field(key, value) for key, value in example.items()}
        if isinstance(example, tuple | list):
            return tuple(self._field(place, value) for place, value in enumerate(example))
        return self._field(0, example)

    def _field(self, key: Any, value: Any) -> Any:
        length = self._length.get(key) if isinstance(self._length, Mapping) else self._length
        if isinstance(value, list) or type(value).__module__ == "numpy":
            value = torch.as_tensor(value)
        if length is None or not isinstance(value, Tensor) or not value.ndim:
            return value
        missing = length - value.shape[0]
        if missing < 0:
            if not self._truncate:
                raise ConfigError(
                    f"a record has more than the {length} positions of PadTo in field {key!r}: "
                    "choose a larger public length, or cut such records with truncate=True."
                )
            return value[:length]
        fill = self._value.get(key, 0) if isinstance(self._value, Mapping) else self._value
        return F.pad(value, (0, 0) * (value.ndim - 1) + (0, missing), value=fill)
