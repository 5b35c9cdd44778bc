"""The model of a statement: it is the published schema, and its errors name place and value."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.statements import whole
from vestige import statement
from vestige.errors import ConfigError


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place of a JSON value; of a list its first entry stands for the others."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in value:
            yield from places(value[key], (*path, key))
    elif isinstance(value, list) and value:
        yield from places(value[0], (*path, 0))


def damaged(value: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The statement with one place changed, removed or added to, in many ways."""
    wrong = (None, True, -1, 1.0, 1.5, "", "text", [1], {"a": 1})
    for path in list(places(value)):
        for change in (*wrong, "remove", "add"):
            broken = copy.deepcopy(value)
            *parents, last = path
            at: Any = broken
            for step in parents:
                at = at[step]
            if change == "remove":
                del at[last]
            elif change == "add":
                if not isinstance(at[last], dict):
                    continue
                at[last]["unknown"] = 1
            else:
                at[last] = change
            yield f"{path} {change!r}", broken


def test_our_check_and_the_published_schema_agree() -> None:
    """But for the one rule that the schema cannot say: no guarantee without an epsilon."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator.check_schema(statement.json_schema())
    validator = jsonschema.Draft202012Validator(statement.json_schema())
    good = whole()
    validator.validate(good)
    statement.check(good)
    counts = {True: 0, False: 0}
    for what, value in damaged(good):
        accepted = validator.is_valid(value)
        try:
            statement.check(value)
        except ConfigError as error:
            assert not accepted or "contradicts" in str(error), what
        else:
            assert accepted, what
        counts[accepted] += 1
    assert counts[False] > 500 and counts[True] > 50


@pytest.mark.parametrize(
    ("path", "value", "words"),
    [
        (("guarantee", "epsilon"), math.nan, "guarantee.epsilon is nan"),
        (("guarantee", "epsilon"), None, "contradicts"),
        (("status",), "none", "contradicts"),
        (("guarantee", "delta"), 1.0, "guarantee.delta is 1.0: it should be less than 1"),
        (
            ("ledger", "events", 0, "count"),
            0,
            r"ledger.events\[0\].count is 0: it should be greater",
        ),
        (("gaussian_dp", "approximate"), False, "it should be True"),
        (("marginal", "note"), "a guarantee", "diagnostic, not a guarantee"),
        (("version",), 2, "version is 2"),
        (("version",), True, "version is True"),
        (("versions", "torch"), "", "must not be empty"),
    ],
)
def test_a_wrong_value_is_named_with_its_place(path: Any, value: Any, words: str) -> None:
    found = whole()
    *parents, last = path
    at: Any = found
    for step in parents:
        at = at[step]
    at[last] = value
    with pytest.raises(ConfigError, match=words):
        statement.check(found)


@pytest.mark.parametrize("value", [None, [], "text", 3, {}], ids=repr)
def test_what_is_no_statement_is_refused(value: Any) -> None:
    with pytest.raises(ConfigError):
        statement.check(value)


@pytest.mark.parametrize("value", [math.nan, [math.inf], {"a": -math.inf}], ids=repr)
def test_no_free_fact_is_beyond_json(value: Any) -> None:
    broken = whole()
    broken["run"]["free"] = value
    with pytest.raises(ConfigError, match=r"run\.free"):
        statement.check(broken)


def test_the_branch_of_a_union_is_no_place() -> None:
    broken = whole()
    broken["ledger"]["events"][0]["noise_multiplier"] = "much"
    with pytest.raises(ConfigError, match="noise_multiplier is 'much': it should be"):
        statement.check(broken)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / statement.JSON_FILE).open("wb") as file:
        file.truncate(64 * 2**20 + 1)
    with pytest.raises(ConfigError, match="larger than 64 MiB"):
        statement.read(tmp_path)


def test_what_was_written_is_read(tmp_path: Path) -> None:
    made = whole()
    (tmp_path / statement.JSON_FILE).write_text(json.dumps(made))
    assert json.dumps(statement.read(tmp_path)) == json.dumps(made)
