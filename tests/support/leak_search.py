"""A search for secrets in bytes: files as they are, archives, base64 and escaped text.

Numbers are found in binary (eight bytes at any offset: one float64, or two float32 neighbours) and
in decimal (nine digits, or three neighbours of a row to four decimals); sequences of whole numbers
as arrays and as text. A chance hit in a megabyte is far below 1e-3.
"""

from __future__ import annotations

import base64
import io
import re
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import unquote_to_bytes

import numpy as np

INT = (np.uint8, np.int32, np.int64)


@dataclass
class Secrets:
    """What must not be found, by kind: numbers, rows of numbers, sequences of whole numbers."""

    numbers: dict[str, list[float]] = field(default_factory=dict)
    rows: dict[str, list[np.ndarray]] = field(default_factory=dict)
    sequences: dict[str, list[list[int]]] = field(default_factory=dict)
    raw: dict[str, list[bytes]] = field(default_factory=dict)

    def found_in(self, data: bytes) -> set[str]:
        """The kinds that `data` holds, in any form."""
        parts = list(views(data))
        return {kind for view in parts for kind in (*self._in_bytes(view), *self._in_text(view))}

    def _in_bytes(self, data: bytes) -> Iterator[str]:
        arrays = {kind: [np.array(values)] for kind, values in self.numbers.items()} | self.rows
        windows = eight_bytes(data)
        for kind, many in arrays.items():
            if words_of(many) & windows:
                yield kind
        whole = [
            (kind, one, t) for kind, many in self.sequences.items() for one in many for t in INT
        ]
        yield from (kind for kind, one, dtype in whole if np.array(one, dtype).tobytes() in data)
        yield from (kind for kind, many in self.raw.items() if any(one in data for one in many))

    def _in_text(self, data: bytes) -> Iterator[str]:
        texts = re.findall(rb"-?\d+(?:\.\d+)?(?:e[+-]?\d+)?", data)
        every = np.array([float(t) for t in texts])
        exact = np.array([float(t) for t in texts if sum(c in b"0123456789" for c in t) >= 9])
        for kind, values in self.numbers.items():
            if close(exact, np.array(values)):
                yield kind
        for kind, rows in self.rows.items():
            if close(exact, np.concatenate(rows)) or beside(every, rows):
                yield kind
        listed = b"," + b",".join(texts) + b","
        for kind, many in self.sequences.items():
            if any(b"," + b",".join(b"%d" % n for n in one) + b"," in listed for one in many):
                yield kind


def views(data: bytes) -> Iterator[bytes]:
    """The bytes as they are, and what they hold inside."""
    yield data
    if zipfile.is_zipfile(io.BytesIO(data)):
        with zipfile.ZipFile(io.BytesIO(data)) as packed:
            yield from (packed.read(name) for name in packed.namelist())
    if b"base64," in data:
        for coded in re.findall(rb"base64,([A-Za-z0-9+/]+={0,2})", data):
            yield base64.b64decode(coded[: len(coded) // 4 * 4])
    if b"%2" in data:
        yield unquote_to_bytes(data)


def eight_bytes(data: bytes) -> set[int]:
    """Every run of eight bytes, at any offset, as one number."""
    found: set[int] = set()
    for offset in range(min(8, max(0, len(data) - 7))):
        found.update(np.frombuffer(data, np.uint64, (len(data) - offset) // 8, offset).tolist())
    return found


def words_of(arrays: list[np.ndarray]) -> set[int]:
    """Eight bytes of each array from each of its numbers on, as float32 and as float64."""
    found: set[int] = set()
    for array in arrays:
        for dtype in (np.float32, np.float64):
            data = array.astype(dtype).tobytes()
            for start in range(0, len(data) - 7, np.dtype(dtype).itemsize):
                found.add(int.from_bytes(data[start : start + 8], sys.byteorder))
    return found - {0}


def close(printed: np.ndarray, values: np.ndarray) -> bool:
    """Whether a printed number is one of the values, to nine digits."""
    values = np.sort(values[values != np.round(values, 5)])  # others are anybody's
    if not len(printed) or not len(values):
        return False
    at = np.searchsorted(values, printed)
    near = np.stack([values[np.maximum(at - 1, 0)], values[np.minimum(at, len(values) - 1)]])
    return bool((np.abs(near - printed) <= 1e-9 * np.abs(near)).any())


def beside(printed: np.ndarray, rows: list[np.ndarray]) -> bool:
    """Whether three neighbours of a row are printed one after the other, to four decimals."""
    if len(printed) < 3:
        return False
    triples = np.lib.stride_tricks.sliding_window_view(printed, 3)
    wanted = [three for row in rows for three in np.lib.stride_tricks.sliding_window_view(row, 3)]
    # Sorted by their first number, so that only a few printed ones are compared with each.
    order = np.argsort(triples[:, 0])
    first = triples[order, 0]
    for three in wanted:
        low, high = np.searchsorted(first, [three[0] - 6e-5, three[0] + 6e-5])
        if (np.abs(triples[order[low:high]] - three) < 6e-5).all(1).any():
            return True
    return False
