"""The kinds of values that a definition has, each with its rule in words.

pydantic checks them; `refusal` says what it found as this project says it: the place in the file,
the key, the value, and what it must be.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

MOST_SEEDS = 1000  # every run of an experiment is listed before the first one starts
_LONGEST = 200  # characters of a value in a message
_TABLES = ("model_type", "model_attributes_type", "dict_type")


class Model(BaseModel):
    """A table of a file: frozen, and without keys that it does not know."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def rule(words: str, good: Callable[[Any], bool]) -> BeforeValidator:
    """A value must be what `words` say; `good` knows whether it is."""

    def check(value: Any) -> Any:
        if not good(value):
            raise PydanticCustomError("rule", "{words}", {"words": words})
        return value

    return BeforeValidator(check)


def refuse(sentence: str) -> PydanticCustomError:
    """An error about a whole table."""
    return PydanticCustomError("sentence", "{sentence}", {"sentence": sentence})


def is_number(value: Any) -> bool:
    """A finite number, and no bool."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


def is_whole(value: Any) -> bool:
    """A whole number of at least 0."""
    return type(value) is int and value >= 0


def _are_texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(item, str) for item in value)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(is_number(item) for item in value)


def _is_span(value: Any) -> bool:
    pair = isinstance(value, list | tuple) and len(value) == 2
    return pair and all(type(end) is int for end in value) and 0 <= value[0] < value[1]


def one_of(choices: Sequence[str]) -> BeforeValidator:
    """One of these words."""
    return rule(f"one of {', '.join(choices)}", lambda value: value in choices)


def some_of(choices: Sequence[str]) -> BeforeValidator:
    """A list of these words."""
    words = f"a list of some of {', '.join(choices)}"
    return rule(words, lambda value: _are_texts(value) and set(value) <= set(choices))


def numbers_of(names: Sequence[str], least: float = -math.inf) -> BeforeValidator:
    """A table of numbers with some of these names."""
    bound = "" if least == -math.inf else f" of at least {least:g}"
    return _table(names, f"a number{bound}", lambda value: is_number(value) and value >= least)


def lists_of(names: Sequence[str]) -> BeforeValidator:
    """A table of lists, none of them empty, with some of these names."""
    return _table(
        names, "a list of values", lambda value: isinstance(value, list | tuple) and len(value) > 0
    )


def _table(names: Sequence[str], words: str, good: Callable[[Any], bool]) -> BeforeValidator:
    def check(values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            if name not in names:
                raise refuse(f"the key {name!r} is unknown: it may have {', '.join(names)}.")
            if not good(value):
                raise refuse(f"{name} = {_shown(value)} is wrong: it must be {words}.")
        ordered = isinstance(values, dict)
        return {name: values[name] for name in names if name in values} if ordered else values

    return BeforeValidator(check)


AnyText = Annotated[str, rule("a text", lambda value: isinstance(value, str))]
Text = Annotated[str, rule("a text", lambda value: isinstance(value, str) and value.strip() != "")]
Texts = Annotated[tuple[str, ...], rule("a list of texts", _are_texts)]
Whole = Annotated[int, rule("a whole number of at least 0", is_whole)]
Seeds = Annotated[
    int,
    rule(
        f"a whole number from 1 to {MOST_SEEDS}",
        lambda value: is_whole(value) and 1 <= value <= MOST_SEEDS,
    ),
]
Number = Annotated[Any, rule("a number", is_number)]
Numbers = Annotated[
    tuple[float, ...],
    rule(
        "a list of different numbers above 0",
        lambda value: (
            _are_numbers(value) and len(set(value)) == len(value) and min(value, default=1) > 0
        ),
    ),
]
Values = Annotated[
    tuple[Any, ...], rule("a list of numbers", lambda value: _are_numbers(value) and bool(value))
]
Span = Annotated[tuple[int, int], rule("a pair [first, end] with 0 <= first < end", _is_span)]
Table = Annotated[dict[str, Any], rule("a table", lambda value: isinstance(value, dict))]


def refusal(error: ValidationError, model: type[BaseModel]) -> str:
    """The first thing that is wrong with the values of a model, in a sentence."""
    first = error.errors(include_url=False)[0]
    location = list(first["loc"])
    if first["type"] == "sentence":
        return f"{_place(location)}: {first['msg']}"
    *above, key = location or ["top level"]
    place = _place(above)
    if first["type"] == "extra_forbidden":
        known = ", ".join(_keys(model, above))
        return f"{place}: the key {key!r} is unknown: it may have {known}."
    if first["type"] == "missing":
        return f"{place}: the key {key!r} is missing: add it."
    words = first["msg"]
    if first["type"] in _TABLES:
        words = "a table"
    elif first["type"] == "tuple_type":
        words = f"written as [[{key}]]"
    return f"{place}: {key} = {_shown(first['input'])} is wrong: it must be {words}."


def _place(location: Sequence[int | str]) -> str:
    """A place of the file in words: ("fair", "arm", 0) is "fair, arm 1"."""
    words = ""
    for part in location:
        words += f" {part + 1}" if isinstance(part, int) else f"{', ' if words else ''}{part}"
    return words or "top level"


def _keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that the table at a place may have."""
    for part in location:
        for name, field in model.model_fields.items():
            if part in (field.alias, name):
                model = _model_in(field.annotation) or model
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    inner = (_model_in(part) for part in getattr(annotation, "__args__", ()))
    return next((found for found in inner if found is not None), None)


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
