"""Privacy units of several records: which rows a user has, and which of them a lot takes.

A lot draws units. Of a drawn unit come `rows_per_unit` rows: all of its records, or so many of
them, chosen uniformly by the stream at (key, lot, unit). A unit with fewer records has its first
row repeated; such a stand-in has weight 0, and the records weight rows_per_unit / records, so that
the unit's loss is the mean over its records.

Guarantee: what a lot takes of one unit follows from the key, the lot and that unit's own records.
Ids are never written: only the order in which they sort is used, and ranks compare their digests.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from vestige.checks import check_count
from vestige.errors import ConfigError
from vestige.sampling.streams import UNIT_ROWS, Randomness

_NONE = {"", "nan", "none", "null", "<na>", "nat"}


class Units:
    """The records of every unit, by the unit's place in the order of ids.

    `ids` has one id for every one of `records` records: a tensor, an array or a list of numbers or
    strings.
    """

    def __init__(self, ids: Any, rows_per_unit: int | None, records: int) -> None:
        if rows_per_unit is None:
            raise ConfigError(
                "units=... without rows_per_unit: declare how many rows of a user a lot may take "
                "at most, a public number such as rows_per_unit=4."
            )
        self.rows_per_unit = check_count("rows_per_unit", rows_per_unit)
        self._ids, owners = _owners(ids, records)
        self._order = hashlib.sha256(owners.tobytes()).hexdigest()
        counts = np.bincount(owners)
        self._members = np.split(np.argsort(owners, kind="stable"), np.cumsum(counts)[:-1])

    def __reduce__(self) -> Any:
        raise TypeError("which records belong to whom is private and cannot be saved")

    def __len__(self) -> int:
        return len(self._members)

    def digests(self) -> list[str]:
        """What ranks compare: a digest of who owns which records, and one of every id."""
        return [self._order, *(hashlib.sha256(_name(i).encode()).hexdigest() for i in self._ids)]

    def rows(
        self, randomness: Randomness, lot: int, units: Sequence[int]
    ) -> tuple[list[int], Tensor | None]:
        """The records of these units in lot `lot`, `rows_per_unit` for each, one unit after the
        other, and the weights of all of them; None where all are 1."""
        rows: list[int] = []
        whole, weights = self.rows_per_unit, np.ones((len(units), self.rows_per_unit))
        for place, unit in enumerate(units):
            some = self._chosen(randomness, lot, unit)
            missing = whole - len(some)
            rows += [*some.tolist(), *[int(some[0])] * missing]
            if missing:
                weights[place, : len(some)] = whole / len(some)
                weights[place, len(some) :] = 0
        full = bool((weights == 1).all())
        return rows, None if full else torch.from_numpy(weights.reshape(-1))

    def _chosen(self, randomness: Randomness, lot: int, unit: int) -> npt.NDArray[np.int64]:
        """At most `rows_per_unit` records of a unit, each subset of that size equally likely."""
        members = self._members[unit]
        if len(members) <= self.rows_per_unit:
            return members
        drawn = randomness.uniforms(UNIT_ROWS + unit.to_bytes(8, "big"), lot, len(members))
        return members[np.sort(np.argsort(drawn, kind="stable")[: self.rows_per_unit])]


def _name(one: Any) -> str:
    """An id as text: the same for 1, 1.0, "1" and b"1", which two ranks may hold for one user."""
    if isinstance(one, bytes):
        return one.decode(errors="replace")
    whole = isinstance(one, float | np.floating) and float(one).is_integer()
    return str(int(one) if whole else one)


def is_missing(one: Any) -> bool:
    """Whether a cell holds no id, also as text that stands for none."""
    if isinstance(one, str | bytes):
        return one.strip().lower() in _NONE if isinstance(one, str) else not one.strip()
    return one is None or one is np.ma.masked or bool(one != one)


def _owners(ids: Any, records: int) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """The sorted ids, and the place of every record's unit among them."""
    if isinstance(ids, Tensor):
        ids = ids.detach().cpu()
        ids = (ids.double() if ids.is_floating_point() else ids).numpy()
    # A list is read before numpy turns what is missing in it into text.
    given = ids if isinstance(ids, np.ndarray) else np.array([*ids, None], dtype=object)[:-1]
    values = np.asarray(ids)
    if values.shape != (records,):
        raise ConfigError(
            f"units has the shape {values.shape} for {records} records: give one id for each "
            "record of the data set, in its order."
        )
    numbers = given.dtype.kind in "iub" and not np.ma.isMaskedArray(given)
    if not numbers and any(map(is_missing, given)):
        raise ConfigError(
            "units has no id for some of the records: they would belong to nobody. Give each an "
            "id, one of its own where it belongs to no one else."
        )
    try:
        every, owners = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise ConfigError(
            "units holds ids of several types, which have no order: make all of them strings, or "
            "all of them numbers."
        ) from error
    return every, owners.astype(np.int64)
