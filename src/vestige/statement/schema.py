"""The check of a statement against the JSON schema that ships with the package.

The schema is plain JSON Schema (draft 2020-12), so that others can use it with any validator. This
checker knows the keywords that it uses and refuses to work with others, so that nothing in the
schema is passed over; a test compares it with the jsonschema package.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from importlib.resources import files
from typing import Any

from vestige.errors import ConfigError

_ABOUT = {"$schema", "$id", "$defs", "title", "description"}
_KEYWORDS = _ABOUT | {
    "$ref",
    "additionalProperties",
    "const",
    "enum",
    "exclusiveMaximum",
    "exclusiveMinimum",
    "items",
    "maximum",
    "minimum",
    "minItems",
    "minLength",
    "properties",
    "required",
    "type",
}
_MOST_SHOWN = 60


@lru_cache(maxsize=1)
def _schema() -> dict[str, Any]:
    path = files("vestige.statement") / "statement.schema.json"
    found = json.loads(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def json_schema() -> dict[str, Any]:
    """The JSON schema of a statement."""
    return json.loads(json.dumps(_schema()))  # type: ignore[no-any-return]


def check(statement: Any) -> None:
    """Raise ConfigError, with the place and the rule, unless this is a statement.

    Beyond the schema: a guarantee is there exactly where its epsilon is finite.
    """
    _compare(statement, _schema(), "")
    guarantee, private = statement["guarantee"], statement["status"] != "none"
    finite = guarantee["epsilon"] is not None
    if not finite == private == (guarantee["kind"] != "none") == (guarantee["reason"] is None):
        raise ConfigError(
            f"status {statement['status']!r} contradicts guarantee {guarantee['kind']!r} with "
            f"epsilon {guarantee['epsilon']!r}"
        )


def _compare(value: Any, rule: Mapping[str, Any], place: str) -> None:
    unknown = set(rule) - _KEYWORDS
    if unknown:
        raise NotImplementedError(f"schema keywords {sorted(unknown)} at {place or 'the top'}")
    if "$ref" in rule:
        _compare(value, _schema()["$defs"][rule["$ref"].removeprefix("#/$defs/")], place)
    if "type" in rule:
        _check_type(value, rule["type"], place)
    if "const" in rule and not _same(value, rule["const"]):
        raise _wrong(value, place, f"it must be {rule['const']!r}")
    if "enum" in rule and not any(_same(value, each) for each in rule["enum"]):
        raise _wrong(value, place, f"it must be one of {', '.join(map(repr, rule['enum']))}")
    if _is(value, "number"):
        _check_range(value, rule, place)
    elif isinstance(value, str) and len(value) < rule.get("minLength", 0):
        raise _wrong(value, place, "it must not be empty")
    elif isinstance(value, list):
        if len(value) < rule.get("minItems", 0):
            raise _wrong(value, place, f"it must have at least {rule['minItems']} entries")
        for number, item in enumerate(value):
            _compare(item, rule.get("items", {}), f"{place}[{number}]")
    elif isinstance(value, dict):
        _check_object(value, rule, place)


def _check_object(value: dict[str, Any], rule: Mapping[str, Any], place: str) -> None:
    known, others = rule.get("properties", {}), rule.get("additionalProperties", {})
    for name in rule.get("required", ()):
        if name not in value:
            raise ConfigError(f"{_at(place, name)} is missing")
    for name, item in value.items():
        if name in known:
            _compare(item, known[name], _at(place, name))
        elif others is False:
            raise ConfigError(f"{_at(place, name[:_MOST_SHOWN])} is not part of a statement")
        else:
            _compare(item, {} if others is True else others, _at(place, name[:_MOST_SHOWN]))


def _check_range(value: float, rule: Mapping[str, Any], place: str) -> None:
    if not -1e300 < value < 1e300:  # JSON has whole numbers that no float can hold
        raise _wrong(value, place, "it is out of range")
    if value < rule.get("minimum", -math.inf) or value <= rule.get("exclusiveMinimum", -math.inf):
        raise _wrong(value, place, "it is too small")
    if value > rule.get("maximum", math.inf) or value >= rule.get("exclusiveMaximum", math.inf):
        raise _wrong(value, place, "it is too large")


def _check_type(value: Any, wanted: str | list[str], place: str) -> None:
    names = [wanted] if isinstance(wanted, str) else wanted
    if not any(_is(value, name) for name in names):
        raise _wrong(value, place, f"it must be {' or '.join(names)}")


def _is(value: Any, name: str) -> bool:
    if name in ("number", "integer"):
        if isinstance(value, bool) or not isinstance(value, int | float):
            return False
        if isinstance(value, float) and not math.isfinite(value):
            return False
        return name == "number" or value == int(value)
    kinds: dict[str, type] = {
        "string": str,
        "boolean": bool,
        "null": type(None),
        "array": list,
        "object": dict,
    }
    return isinstance(value, kinds[name])


def _same(value: Any, other: Any) -> bool:
    return bool(isinstance(value, bool) == isinstance(other, bool) and value == other)


def _at(place: str, name: str) -> str:
    return f"{place}.{name}" if place else name


def _wrong(value: Any, place: str, rule: str) -> ConfigError:
    told = repr(value) if not isinstance(value, list | dict) else f"a {type(value).__name__}"
    shown = told if len(told) <= _MOST_SHOWN else f"{told[:_MOST_SHOWN]}..."
    return ConfigError(f"{place or 'the statement'} is {shown}: {rule}")
