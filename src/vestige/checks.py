"""Small checks that every room needs: numbers, counts, shares and plain types, once."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from vestige.errors import ConfigError


def is_number(value: Any) -> bool:
    """A finite int or float, and no bool."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def check_count(name: str, value: Any) -> int:
    """A positive whole number, or ConfigError."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    return value


def check_share(name: str, value: Any) -> None:
    """A number in (0, 1], such as beta or a sampling rate."""
    if not is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r} must be in (0, 1].")


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's own numbers and tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value


def as_json(value: Any) -> Any:
    """Mappings and sequences as the dicts and lists that JSON has."""
    if isinstance(value, Mapping):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, list | tuple) else value


def frozen(value: Any) -> Any:
    """JSON with tuples in place of its lists, as settings have them."""
    if isinstance(value, Mapping):
        return {key: frozen(item) for key, item in value.items()}
    return tuple(frozen(item) for item in value) if isinstance(value, list) else value
