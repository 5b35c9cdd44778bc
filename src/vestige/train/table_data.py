"""Records in a table: read from CSV or parquet, and made into numbers by a public schema.

Guarantee: every row becomes numbers by itself, by declared ranges and categories alone, and goes to
the training or the held-out split by a hash of itself: another record more or less moves nothing.
"""

from __future__ import annotations

import csv
import hashlib
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vestige.errors import ConfigError
from vestige.sampling.units import is_missing
from vestige.train.schema import Column, Schema, days, number

Table = Mapping[str, Sequence[Any]]


def read_table(path: Path) -> dict[str, Sequence[Any]]:
    """The columns of a CSV or parquet file by name; ConfigError where it cannot be read."""
    try:
        if path.suffix.lower() == ".parquet":
            return _read_parquet(path)
        with path.open(encoding="utf-8-sig", newline="") as file:
            head = file.readline()
            delimiter = max(",;\t", key=head.count)
            names = next(csv.reader([head], delimiter=delimiter), [])
            rows = list(csv.reader(file, delimiter=delimiter))
    except FileNotFoundError as error:
        raise ConfigError(f"{str(path)!r} does not exist: check the path.") from error
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a CSV file in UTF-8.") from error
    names = [name.strip() for name in names]
    if not any(names):
        raise ConfigError(
            f"{path} is empty: its first line must name the columns, and each line after it is a "
            "record."
        )
    if not all(names) or len(set(names)) < len(names):
        raise ConfigError(
            f"the first line of {path} must name every column once: it has an empty name or one "
            "twice."
        )
    rows = [row for row in rows if row]
    if not rows:
        raise ConfigError(f"{path} has a line of names and no record: check that it is complete.")
    for line, row in enumerate(rows, start=2):
        if len(row) != len(names):
            raise ConfigError(
                f"line {line} of {path} has {len(row)} cells and the first line {len(names)}: "
                "mend the file."
            )
    return {name: [row[place] for row in rows] for place, name in enumerate(names)}


def _read_parquet(path: Path) -> dict[str, Sequence[Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"{path.name} needs pyarrow, which is not installed: pip install 'vestige-dp[data]', "
            "or give the data as CSV."
        ) from error
    try:
        columns: dict[str, Sequence[Any]] = parquet.read_table(path).to_pydict()
        if not any(columns.values()):
            raise ConfigError(f"{path} has no record: check that it is complete.")
        return columns
    except ArrowException as error:
        raise ConfigError(f"{path} cannot be read ({error}): give a parquet file.") from error


def kinds(table: Table) -> dict[str, str]:
    """Which columns hold numbers, categories and dates, for a draft that a person checks."""
    return {name: _kind(values) for name, values in table.items()}


def _kind(values: Sequence[Any]) -> str:
    for kind, read in (("number", number), ("date", days)):
        if all(read(value) is not None or is_missing(value) for value in values):
            return kind
    return "category"


_WRITTEN = {
    "number": "numbers with a decimal point and without a unit",
    "date": "dates as 2015-12-31",
}


def encode(schema: Schema, table: Table, training: bool = False) -> NDArray[np.float32]:
    """The inputs of a model: one number for a number, one for each category and one for others.

    A filled cell of a number that cannot be read as one is refused, as are, in training, categories
    of which no record has any. Where the schema drops records, such rows hold NaN in training.
    """
    dropped = training and schema.unknown == "drop"
    parts = []
    for name in schema.features:
        column, values = schema.columns[name], _values(table, name)
        part = _encoded(column, values)
        if column.kind != "category" and not dropped and np.isnan(part).any():
            more = ', or leave such records out with unknown = "drop"' if training else ""
            place = int(np.isnan(part[:, 0]).argmax())
            raise ConfigError(
                f"the {name} of record {place + 1} is no {column.kind}: write "
                f"{_WRITTEN[column.kind]}, and nothing where one is missing; or declare {name} as "
                f"a category{more}."
            )
        if column.kind == "category":
            _check_categories(name, column, values, part, training)
        parts.append(part)
    return np.concatenate(parts, axis=1).astype(np.float32)


def _check_categories(
    name: str, column: Column, values: Sequence[Any], part: NDArray[np.float64], training: bool
) -> None:
    """Say that no record has a declared category, unless their cells are all empty."""
    if part[:, :-1].any() or all(map(is_missing, values)):
        return
    what = f"no record has one of the declared categories of {name}"
    if training:
        raise ConfigError(
            f"{what}, and all would count as other: write its categories ("
            f"{', '.join(column.categories)}) as the file does, with the same case and spaces, or "
            "remove the column from the schema."
        )
    warnings.warn(f"{what}: all count as other.", stacklevel=4)


def width(schema: Schema) -> int:
    """How many numbers `encode` makes of a record."""
    columns = [schema.columns[name] for name in schema.features]
    return sum(len(c.categories) + 1 if c.kind == "category" else 1 for c in columns)


def targets(schema: Schema, table: Table) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """What is to be predicted, and which rows have it.

    Regression: scaled to -1 ... 1. Multi-label: 0 for the first category, 1 for the second.
    """
    numbers = []
    for name in schema.target:
        column, values = schema.columns[name], _values(table, name)
        if column.kind == "number":
            scaled = [math.nan if number(v) is None else _scaled(column, v) for v in values]
            numbers.append(np.array(scaled, dtype=np.float64))
        else:
            places = {category: place for place, category in enumerate(column.categories)}
            found = [places.get(_text(v), math.nan) for v in values]
            numbers.append(np.array(found, dtype=np.float64))
    y = np.stack(numbers, axis=1)
    known: NDArray[np.bool_] = np.isfinite(y).all(axis=1)  # type: ignore[assignment]
    if schema.unknown == "refuse" and not known.all():
        row = int(np.flatnonzero(~known)[0])
        remedy = "write a number" if schema.task == "regression" else "declare its category"
        raise ConfigError(
            f"record {row + 1} has no known {' or '.join(schema.target)}: {remedy} in the "
            f"{'data' if schema.task == 'regression' else 'schema'}, or leave such records out "
            'with unknown = "drop".'
        )
    if schema.task == "classification":
        return np.where(known, y[:, 0], 0).astype(np.int64), known
    return np.where(known[:, None], y, 0).astype(np.float32), known


def in_held_out(records: Iterable[bytes], share: float) -> NDArray[np.bool_]:
    """Which records no run trains on: by a hash of each record.

    It follows no seed, so that runs on the same data hold out the same records: those that one run
    trains on and another measures on would be on two ledgers.
    """
    places = (hashlib.blake2b(record, digest_size=8).digest() for record in records)
    return np.array([int.from_bytes(place, "big") < share * 2**64 for place in places], dtype=bool)


def ids(table: Table, name: str) -> NDArray[Any]:
    """The column that says whose each row is, as text; every row must have one."""
    found = [_text(value) for value in _values(table, name)]
    missing = [is_missing(text) for text in found]
    if any(missing):
        raise ConfigError(
            f"row {missing.index(True) + 1} has no {name}, and so belongs to no user: give every "
            "row an id, one of its own where it belongs to nobody else."
        )
    return np.array(found, dtype=object)


def row_bytes(table: Table) -> Iterable[bytes]:
    """Each row as bytes: all of its cells, whichever of them a schema uses."""
    return ("\x1f".join(map(_text, row)).encode() for row in zip(*table.values(), strict=True))


def _values(table: Table, name: str) -> Sequence[Any]:
    if name not in table:
        raise ConfigError(
            f"there is no column {name!r} in the data: it has {', '.join(map(str, table))}."
        )
    return table[name]


def _encoded(column: Column, values: Sequence[Any]) -> NDArray[np.float64]:
    if column.kind != "category":
        scaled = np.array([_scaled(column, value) for value in values], dtype=np.float64)
        return scaled[:, None]
    places = {category: place for place, category in enumerate(column.categories)}
    found = [places.get(_text(value), len(places)) for value in values]
    return np.eye(len(places) + 1)[np.array(found, dtype=np.int64)]


def _scaled(column: Column, value: Any) -> float:
    """A value clipped to the declared range and scaled to -1 ... 1; NaN for other text."""
    low, high = column.bounds
    found = column.place(value)
    if found is None and not is_missing(value):
        return math.nan
    if found is None:
        found = column.place(column.missing)
    if found is None:
        found = (low + high) / 2
    return 2 * (min(max(found, low), high) - low) / (high - low) - 1


def _text(value: Any) -> str:
    """A cell as the text that categories are declared by: 1.0 is "1"."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return "" if value is None else str(value).strip()
