"""One table of a TOML file, read key by key: what is unknown or of the wrong kind is refused.

Every message names the file, the place in it and the key, so that it can be mended at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vestige.checks import is_number
from vestige.errors import ConfigError


class Section:
    """A table at a place of a file. `finish` refuses the keys that nobody has asked for."""

    def __init__(self, values: Any, file: str, place: str) -> None:
        self._file, self._place = file, place
        if not isinstance(values, dict):
            raise ConfigError(f"{file}: {place} must be a table, not {values!r}.")
        self._values = values
        self._asked: set[str] = set()

    @property
    def place(self) -> str:
        """Where this is, for messages: "FILE: PLACE"."""
        return f"{self._file}: {self._place}"

    def refuse(self, message: str) -> ConfigError:
        """An error about this section."""
        return ConfigError(f"{self.place}: {message}")

    def has(self, key: str) -> bool:
        """Whether the key is given."""
        self._asked.add(key)
        return key in self._values

    def raw(self, key: str, default: Any = None) -> Any:
        """The value as it stands."""
        self._asked.add(key)
        return self._values.get(key, default)

    def text(self, key: str, default: str | None = None) -> str:
        """A non-empty text; required without a default."""
        value = self._required(key, default)
        if not isinstance(value, str) or (default is None and not value.strip()):
            raise self._wrong(key, value, "a text")
        return value

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of texts, empty where it is not given."""
        value = self.raw(key, [])
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self._wrong(key, value, "a list of texts")
        return tuple(value)

    def whole(self, key: str, default: int | None = None, least: int = 0) -> int:
        """A whole number of at least `least`."""
        value = self._required(key, default)
        if type(value) is not int or value < least:
            raise self._wrong(key, value, f"a whole number of at least {least}")
        return value

    def numbers(self, key: str, default: Iterable[float] | None = None) -> tuple[float, ...]:
        """A list of positive numbers without repetitions."""
        value = self._required(key, None if default is None else list(default))
        good = isinstance(value, list) and all(_is_positive(item) for item in value)
        if not good or len(set(value)) != len(value):
            raise self._wrong(key, value, "a list of different numbers above 0")
        return tuple(float(item) for item in value)

    def span(self, key: str, default: tuple[int, int] | None = None) -> tuple[int, int]:
        """Two whole numbers [first, end]: the images first, ..., end - 1."""
        value = self._required(key, None if default is None else list(default))
        pair = isinstance(value, list) and len(value) == 2
        if not pair or any(type(end) is not int for end in value) or not 0 <= value[0] < value[1]:
            raise self._wrong(key, value, "a pair [first, end] with 0 <= first < end")
        return value[0], value[1]

    def choice(self, key: str, choices: Iterable[str], default: str | None = None) -> str:
        """One of `choices`."""
        value = self._required(key, default)
        known = tuple(choices)
        if value not in known:
            raise self._wrong(key, value, f"one of {', '.join(known)}")
        return str(value)

    def table(self, key: str) -> Section | None:
        """A table inside this one, if it is given."""
        return Section(self.raw(key), self._file, self._inner(key)) if self.has(key) else None

    def tables(self, key: str) -> list[Section]:
        """A list of tables, empty where it is not given."""
        value = self.raw(key, [])
        if not isinstance(value, list):
            raise self._wrong(key, value, f"written as [[{key}]]")
        return [
            Section(item, self._file, f"{self._inner(key)} {number}")
            for number, item in enumerate(value, start=1)
        ]

    def items(self) -> dict[str, Any]:
        """All that is in the table; nothing of it counts as unknown."""
        self._asked.update(self._values)
        return dict(self._values)

    def finish(self) -> None:
        """Refuse keys that no reader has asked for."""
        unknown = [key for key in self._values if key not in self._asked]
        if unknown:
            raise self.refuse(
                f"the key {unknown[0]!r} is unknown: it may have {', '.join(sorted(self._asked))}."
            )

    def _inner(self, key: str) -> str:
        return key if self._place == "top level" else f"{self._place}, {key}"

    def _required(self, key: str, default: Any) -> Any:
        value = self.raw(key, default)
        if value is None:
            raise self.refuse(f"the key {key!r} is missing: add it.")
        return value

    def _wrong(self, key: str, value: Any, rule: str) -> ConfigError:
        return self.refuse(f"{key} = {value!r} is wrong: it must be {rule}.")


def _is_positive(value: Any) -> bool:
    return is_number(value) and value > 0
