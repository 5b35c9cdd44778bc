"""Options as frozen models: type, range and help of each are declared once, in its field.

The command line, config.json, the docs and the error messages are derived from the fields. Nothing
here imports torch: a wrong option is answered at once.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    GetCoreSchemaHandler,
    TypeAdapter,
    ValidationError,
)
from pydantic.fields import FieldInfo
from pydantic_core import core_schema

from vestige.checks import plain
from vestige.errors import ConfigError
from vestige.privacy.accounting import ACCOUNTANTS, accountant_name

Count = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
File = Annotated[Path, Field(strict=False)]  # its name will do
Delta = Annotated[float, Field(gt=0, lt=1, description="The delta of (epsilon, delta).")]
SampleRate = Annotated[
    float, Field(gt=0, le=1, description="A record's chance to be in a lot: lot / records.")
]


def _known_accountant(name: str) -> str:
    accountant_name(name)
    return name


Accountant = Annotated[
    str,
    AfterValidator(_known_accountant),
    Field(description=f"Accountant of epsilon: {', '.join(ACCOUNTANTS)}."),
]


@dataclass(frozen=True)
class OneOf:
    """Text that is one of `choices`: as `Literal`, for names that are a tuple somewhere."""

    choices: tuple[str, ...]

    def __get_pydantic_core_schema__(
        self, source: Any, handler: GetCoreSchemaHandler
    ) -> core_schema.CoreSchema:
        return core_schema.literal_schema(list(self.choices))


_KINDS = {
    "integer": "a whole number",
    "number": "a finite number",
    "string": "text",
    "path": "a path",
    "boolean": "True or False",
}


class Options(BaseModel):
    """The base of every set of options: frozen, with exact types and no unknown names.

    Numbers of numpy and torch count as Python's own, and lists as tuples.
    A bad value raises ConfigError with the value, the rule and the remedy. The value of a field
    that is not to be shown (`repr=False`) is left out; a field with a reason of its own has that
    as `json_schema_extra={"rule": ...}`.
    """

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", hide_input_in_errors=True, protected_namespaces=()
    )

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**{name: plain(value) for name, value in values.items()})
        except ValidationError as error:
            raise ConfigError(_sentence(type(self), error)) from None

    def changed(self, **values: Any) -> Self:
        """The same options but for `values`, checked again."""
        return type(self)(**dict(self) | values)


def rule(field: FieldInfo) -> str:
    """The values that a field takes, in words: "a whole number of at least 1"."""
    declared: Any = Annotated[field.annotation, "", *field.metadata]
    limits = TypeAdapter(declared).json_schema()
    # The first form that is not None stands for the others.
    limits |= next((form for form in limits.get("anyOf", []) if form.get("type") != "null"), {})
    if "enum" in limits or "const" in limits:
        return f"one of {', '.join(limits.get('enum') or [limits['const']])}"
    words = _KINDS.get(limits.get("format", limits.get("type", "")), "a value")
    least, above = limits.get("minimum"), limits.get("exclusiveMinimum")
    most, below = limits.get("maximum"), limits.get("exclusiveMaximum")
    if above is not None and below is not None:
        return f"a number strictly between {above} and {below}"
    if above is not None:
        return (
            f"{words} above {above}"
            if most is None
            else f"a number above {above} and at most {most}"
        )
    if below is not None:
        power = below.bit_length() - 1  # 2^63 rather than its nineteen digits
        return f"{words} from {least} to {f'2^{power}' if below == 2**power else below} - 1"
    return words if least is None else f"{words} of at least {least}"


def _sentence(model: type[Options], error: ValidationError) -> str:
    """The first thing that is wrong: the value, the rule and the remedy."""
    problems = error.errors(include_url=False)
    place = problems[0]["loc"][:1]
    # Of the ways to read a field, the one that goes deepest names the part that is wrong.
    problem = max((p for p in problems if p["loc"][:1] == place), key=lambda p: len(p["loc"]))
    refusal = problem.get("ctx", {}).get("error")
    if isinstance(refusal, ConfigError):
        return str(refusal)
    name, fields = str(place[0]), model.model_fields
    if problem["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, fields, n=1)
        names = f"did you mean {near[0]}?" if near else f"choose from {', '.join(fields)}."
        return f"{name} is unknown: {names}"
    field = fields[name]
    if isinstance(field.json_schema_extra, dict) and problem["type"] != "missing":
        return f"{name}={problem['input']!r} {field.json_schema_extra['rule']}"
    words = rule(field)
    if problem["type"] == "missing":
        return f"{name} is missing: give {words}."
    if not field.repr:
        return f"{name} must be {words}."
    value = problem["input"]
    if words.startswith("one of"):
        return f"{name} {value!r} is unknown: choose {words}."
    if "whole number" in words:
        return f"{name}={value!r} must be {words}."
    return f"{name} {value!r} is out of range: give {words}."
