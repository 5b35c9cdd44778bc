"""The kinds of values that a definition has, and what pydantic finds wrong in this project's words.

A refusal names the place in the file, the key, the value, and what it must be.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
)
from pydantic_core import ErrorDetails, PydanticCustomError

from vestige.checks import is_number
from vestige.errors import ConfigError

MOST_SEEDS = 1000  # every run of an experiment is listed before the first one starts
_LONGEST = 200  # characters of a value in a message


class Model(BaseModel):
    """A table of a file: frozen, without keys that it does not know, 1 is not True."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class RunModel(Model):
    """What one run is told, made in code as well as from a file: ConfigError for a bad value."""

    called: ClassVar[str] = "the run"

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ConfigError(refusal(error, type(self), self.called)) from error


def refuse(sentence: str) -> PydanticCustomError:
    """An error that says all there is to say about a table."""
    return PydanticCustomError("sentence", "{sentence}", {"sentence": sentence})


def one_of(names: Sequence[str]) -> AfterValidator:
    """A text must be one of these."""

    def check(value: str) -> str:
        if value not in names:
            words = f"it must be one of {', '.join(names)}"
            raise PydanticCustomError("one_of", "{words}", {"words": words})
        return value

    return AfterValidator(check)


def _number(value: Any) -> Any:
    if not is_number(value):
        raise PydanticCustomError("number", "it must be a number")
    return value


def _span(value: list[int]) -> list[int]:
    if len(value) != 2 or not 0 <= value[0] < value[1]:
        raise PydanticCustomError("span", "it must be a pair [first, end] with 0 <= first < end")
    return value


def _different(values: list[float]) -> list[float]:
    if len(set(values)) < len(values):
        raise PydanticCustomError("different", "it must be a list of different numbers")
    return values


Text = Annotated[str, StringConstraints(pattern=r"\S")]
Whole = Annotated[int, Field(ge=0)]
Seeds = Annotated[int, Field(ge=1, le=MOST_SEEDS)]
Number = Annotated[Any, AfterValidator(_number)]  # 1 stays 1, and 1.0 stays 1.0
Numbers = Annotated[list[Annotated[float, Field(gt=0)]], AfterValidator(_different)]
Span = Annotated[list[int], AfterValidator(_span)]


def refusal(error: ValidationError, model: type[BaseModel], top: str = "top level") -> str:
    """The first thing that is wrong with the values of a model, in a sentence.

    `top` is what the place of the model itself is called.
    """
    first = error.errors(include_url=False)[0]
    location = [part for part in first["loc"] if part != "[key]"]
    if first["type"] == "sentence":
        return f"{_place(location) or top}: {first['msg']}"
    *above, key = location
    if isinstance(key, int):
        key = f"{above.pop()} {key + 1}"  # an item of a list goes by the name of the list
    place = _place(above) or top
    if first["type"] == "extra_forbidden":
        known = ", ".join(_keys(model, above))
        return f"{place}: the key {key!r} is unknown: it may have {known}."
    if first["type"] == "missing":
        return f"{place}: the key {key!r} is missing: add it."
    return f"{place}: {key} = {_shown(first['input'])} is wrong: {rule_of(first)}."


def rule_of(error: ErrorDetails) -> str:
    """What a value must be, in words."""
    return error["msg"].replace("Input should", "it must").replace("String should", "it must")


def _place(location: Sequence[int | str]) -> str:
    """A place of the file in words: ("fair", "arm", 0) is "fair, arm 1"."""
    words = ""
    for part in location:
        words += f" {part + 1}" if isinstance(part, int) else f"{', ' if words else ''}{part}"
    return words


def _keys(model: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The keys that the table at a place may have."""
    for part in location:
        field = {field.alias or name: field for name, field in model.model_fields.items()}.get(
            str(part)
        )
        annotation = field.annotation if field else model
        inner = (annotation, *getattr(annotation, "__args__", ()))
        model = next((t for t in inner if isinstance(t, type) and issubclass(t, BaseModel)), model)
    return sorted(field.alias or name for name, field in model.model_fields.items())


def _shown(value: Any) -> str:
    shown = repr(value)
    return shown if len(shown) <= _LONGEST else f"{shown[:_LONGEST]}..."
