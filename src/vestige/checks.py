"""Small things that every room needs, once: numbers, counts, plain types, rounding, states, and
how an object shows itself.

Nothing here imports torch: tensors are known by their `tolist`, `shape` and `dtype`.
"""

from __future__ import annotations

import decimal
import math
import re
import unicodedata
from collections.abc import Callable, Mapping
from html import escape
from pathlib import PurePath
from typing import Any

from vestige.errors import ConfigError

NO_GUARANTEE = "no guarantee"
_EXACT = decimal.Context(prec=1000)  # enough for every digit of every float


def is_number(value: Any) -> bool:
    """A finite int or float, and no bool."""
    try:
        return type(value) in (int, float) and math.isfinite(value)
    except OverflowError:  # an int beyond all floats
        return False


def is_whole(value: Any) -> bool:
    """An int, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool)


def check_count(name: str, value: Any) -> int:
    """A positive whole number, or ConfigError."""
    if not is_whole(value) or value < 1:
        raise ConfigError(f"{name}={value!r} must be a whole number of at least 1.")
    return int(value)


def check_share(name: str, value: Any) -> None:
    """A number in (0, 1], such as beta or a sampling rate."""
    if not is_number(value) or not 0 < value <= 1:
        raise ConfigError(f"{name}={value!r} must be in (0, 1].")


def finite(value: float) -> float | None:
    """The number, or None for infinity and NaN, which JSON does not have."""
    return value if math.isfinite(value) else None


def plain(value: Any) -> Any:
    """Numbers and arrays of numpy or torch as Python's own numbers; lists as tuples."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: plain(item) for key, item in value.items()}
    return tuple(plain(item) for item in value) if isinstance(value, list | tuple) else value


def as_json(value: Any, other: Callable[[Any], Any] | None = None) -> Any:
    """`value` in the types that strict JSON has: dicts, lists, and Python's own numbers.

    Infinity and NaN become text. What JSON has no type for is handed to `other`; without it a path
    becomes text, and anything else stays, for `json.dumps` to refuse.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): as_json(item, other) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [as_json(item, other) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if other is not None:
        return other(value)
    return str(value) if isinstance(value, PurePath) else value


def round_up(value: float | None, places: int = 2, none: str = NO_GUARANTEE) -> str:
    """An epsilon, or the noise for it, as text: less would claim more than is known.

    Decimal rounding up of the shortest text that stands for the number: 1.1 is 1.10 and 1.1001 is
    1.11. Guarantee: the text, read as a number, is never below `value`. Infinity is "inf", and
    None, which stands for it in JSON, is `none`.
    """
    return none if value is None else _rounded(value, places, decimal.ROUND_CEILING)


def round_down(value: float | None, places: int = 2, none: str = "none") -> str:
    """A lower bound as text, never above `value`: more would claim more than was shown."""
    return none if value is None else _rounded(value, places, decimal.ROUND_FLOOR)


def digits_up(value: float, digits: int) -> float:
    """A number above 0 rounded up to so many significant digits; 0 and infinity as they are."""
    if value == 0 or not math.isfinite(value):
        return value
    return float(round_up(value, digits - 1 - math.floor(math.log10(value))))


def _rounded(value: float, places: int, how: str) -> str:
    exact = decimal.Decimal(value if is_whole(value) else repr(float(value)))
    if not exact.is_finite():
        return str(float(value))
    unit = decimal.Decimal(1).scaleb(-places)
    # `plus` takes the sign from a zero.
    return f"{_EXACT.plus(exact.quantize(unit, how, _EXACT)):f}"


def printable(value: object) -> str:
    """Text without control characters: no forged line, no escape sequence, no turned direction."""
    return "".join(c for c in str(value) if unicodedata.category(c)[0] != "C")


def one_line(value: object) -> str:
    """The same, with a space where there was white space of any kind."""
    return " ".join(printable(re.sub(r"\s", " ", str(value))).split())


class Shown:
    """Gives a class `repr` and `_repr_html_` from the facts that it names.

    Guarantee: no fact is obeyed. Each stays on its line, and HTML in it is text.
    """

    def _shown(self, whole: bool) -> Mapping[str, object]:
        """Public facts by name; what takes long to compute only where `whole`."""
        raise NotImplementedError

    def __repr__(self) -> str:
        facts = (f"{name} {one_line(fact)}" for name, fact in self._shown(False).items())
        return f"{type(self).__name__}: {'; '.join(facts)}."

    def _repr_html_(self) -> str:
        rows = "".join(
            f'<tr><th scope="row" style="text-align: left">{escape(name)}</th>'
            f'<td style="text-align: left">{escape(one_line(fact))}</td></tr>'
            for name, fact in self._shown(True).items()
        )
        caption = f"<caption>{escape(type(self).__name__)}</caption>"
        return f"<table>{caption}<tbody>{rows}</tbody></table>"


def check_state(what: str, saved: Any, ours: Any, finite_entries: bool = False) -> None:
    """Refuse a loaded state that is not like `ours`, the state of the object that is to take it.

    The same names, types, lengths and shapes; counts of at least 0; finite numbers; and, where
    `finite_entries` asks for it, finite arrays and tensors. ConfigError says what does not fit.
    """
    misfit = _misfit(saved, ours, finite_entries)
    if misfit:
        raise ConfigError(
            f"the saved {what} does not fit: {misfit}. It was written by a run with another model, "
            "method or clipping, or was damaged."
        )


def _misfit(saved: Any, ours: Any, finite_entries: bool) -> str | None:
    """What does not fit, in words; None where everything does."""
    if isinstance(ours, Mapping):
        if not isinstance(saved, Mapping) or saved.keys() != ours.keys():
            return f"it should hold {', '.join(map(repr, ours))}"
        pairs = [(saved[name], value, repr(name)) for name, value in ours.items()]
    elif isinstance(ours, list | tuple):
        if not isinstance(saved, list | tuple) or len(saved) != len(ours):
            return f"it should be a list of {len(ours)}"
        pairs = [(a, b, f"entry {i}") for i, (a, b) in enumerate(zip(saved, ours, strict=True))]
    else:
        return None if _alike(saved, ours, finite_entries) else _wanted(ours)
    for item, like, name in pairs:
        inner = _misfit(item, like, finite_entries)
        if inner:
            return f"{name}: {inner}"
    return None


def _alike(saved: Any, ours: Any, finite_entries: bool) -> bool:
    if hasattr(ours, "shape"):
        if not isinstance(saved, type(ours)):
            return False
        same = (saved.shape, saved.dtype) == (ours.shape, ours.dtype)
        return same and (not finite_entries or bool((saved * 0 == 0).all()))
    if isinstance(ours, bool | str) or ours is None:
        return type(saved) is type(ours)
    return is_number(saved) and (not is_whole(ours) or (is_whole(saved) and saved >= 0))


def _wanted(ours: Any) -> str:
    if hasattr(ours, "shape"):
        return f"it should be {ours.dtype} of shape {tuple(ours.shape)}, and finite"
    if is_whole(ours):
        return "it should be a count"
    return f"it should be a {type(ours).__name__}"
