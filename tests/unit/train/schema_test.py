"""The public schema: a draft holds no value, and nothing undeclared is trained on."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_tables import rows, write_table
from vestige.errors import ConfigError
from vestige.train import schema, table_data
from vestige.train.schema import default_path, draft, draft_images, read_schema, restored

COLUMNS = {"a": {"kind": "number", "range": [0, 1]}, "y": {"kind": "category"}}


def test_a_draft_holds_names_and_kinds_and_no_value() -> None:
    table = {name: [row[name] for row in rows()] for name in rows()[0]}
    text = draft("t.csv", table_data.kinds(table), ["ill"], "classification")
    for row in rows():
        assert str(row["age"]) not in text and str(row["days"]) not in text
    assert "north" not in text and '"yes"' not in text
    facts = tomllib.loads(text)
    assert facts["columns"]["age"] == {"kind": "number", "range": []}
    assert facts["columns"]["town"] == {"kind": "category", "categories": []}
    assert text.count("DECLARE") == 1 + 1 + len(table)  # the head, frequencies, each column
    drafted = restored(facts)
    with pytest.raises(ConfigError, match="undeclared are range of age, categories of town, "):
        drafted.check_declared()


def test_a_draft_of_odd_names_can_be_read() -> None:
    names = {'a "b"\\': "number", "größe": "number", "x.y": "category", "u": "category"}
    text = draft("t.csv", names, ["x.y"], "multi-label")
    assert list(tomllib.loads(text)["columns"]) == list(names)
    images = tomllib.loads(draft_images("photos", ["cats", "dogs"]))
    assert images["columns"]["folder"]["categories"] == ["cats", "dogs"]
    assert images["image"] == []
    with pytest.raises(ConfigError, match=r"^undeclared is image: .* example \[3, 32, 32\]"):
        restored(images)


def test_what_people_write_is_understood() -> None:
    found = restored(
        {
            "target": "y",
            "columns": {
                "a": {"kind": "number", "range": [0, 120], "missing": 3},
                "y": {"kind": "category", "categories": [0, 1]},
            },
            "frequencies": [0.9, 0.1],
        }
    )
    assert found.columns["a"].range == (0.0, 120.0)
    assert found.labels == ("0", "1")
    assert restored(found.as_json()) == found


def test_dates_are_declared_as_toml_or_as_text_writes_them() -> None:
    for written in ("[2015-01-01, 2024-12-31]", '["2015-01-01", "2024-12-31"]'):
        facts = tomllib.loads(f'kind = "date"\nrange = {written}\nmissing = 2020-02-29\n')
        found = restored({"target": "y", "columns": COLUMNS | {"d": facts}})
        assert found.columns["d"].range == ("2015-01-01", "2024-12-31")
        assert found.columns["d"].bounds[1] - found.columns["d"].bounds[0] == 3652
        assert restored(json.loads(json.dumps(found.as_json()))) == found


def test_a_draft_takes_one_target_for_classification() -> None:
    kinds = {"a": "number", "y": "category", "z": "category"}
    with pytest.raises(ConfigError, match=r"y, z has 2 columns.*--task multi-label"):
        draft("t.csv", kinds, ["y", "z"], "classification")
    assert 'target = ["y", "z"]' in draft("t.csv", kinds, ["y", "z"], "multi-label")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target": "z"}, "target z is no column of the schema: it has a, y"),
        ({"task": "rank"}, "task 'rank' is unknown: choose one of classification"),
        ({"task": "regression"}, "the target y is a category, and regression needs a number"),
        ({"task": "multi-label", "target": ["a"]}, "the target a is a number"),
        ({"target": ["a", "y"]}, "classification takes one"),
        ({"held_out": 1.0}, "held_out 1.0 is out of range"),
        ({"frequencies": [0.5, 0.5]}, "one share for each of the 0 classes"),
        ({"colour": "red"}, "colour is unknown: did you mean columns"),
        ({"columns": {"y": {"kind": "category"}}}, "no column but the target"),
        ({"columns": {"y": {"kind": "category", "range": [2, 1]}}}, "column y: range"),
        ({"columns": {"y": {"kind": "category", "categories": ["a", "a"]}}}, "names one twice"),
        ({"columns": {"y": {"kind": "time"}}}, "column y: kind 'time' is unknown"),
        ({"columns": {"y": {"kind": "number", "range": ["1", "2"]}}}, "two finite numbers"),
        ({"columns": {"y": {"kind": "number", "range": [1]}}}, "two finite numbers"),
        ({"columns": {"y": {"kind": "number", "missing": "none"}}}, "missing 'none' must be one"),
        ({"columns": {"y": {"kind": "date", "range": [1, 2]}}}, "must be two dates"),
        ({"columns": {"y": {"kind": "date", "range": ["2015", "x"]}}}, "must be two dates"),
        ({"columns": 3}, r"no \[columns.NAME\] tables"),
        ({"image": [5, 5]}, r"image \[5, 5\] must be channels"),
    ],
)
def test_a_wrong_schema_is_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        restored({"target": "y", "columns": COLUMNS} | changes)


@pytest.mark.parametrize("task", ["classification", "multi-label"])
def test_a_target_needs_its_categories(task: str) -> None:
    facts = {"target": "y", "task": task, "columns": COLUMNS | {"y": {"kind": "category"}}}
    facts["columns"]["y"] = {"kind": "category", "categories": ["only"]}
    with pytest.raises(ConfigError, match="the target y has 1 categories"):
        restored(facts).check_declared()


def test_the_schema_lies_beside_the_data_or_where_it_is_named(tmp_path: Path) -> None:
    path = write_table(tmp_path / "a.csv")
    assert read_schema(path, None).target == ("ill",)
    assert read_schema(path, None, ("tall",)).target == ("tall",)
    moved = tmp_path / "other.toml"
    default_path(path).rename(moved)
    assert read_schema(path, moved).target == ("ill",)
    with pytest.raises(ConfigError, match=r"draft one with `vestige schema .*a.csv --target ill`"):
        read_schema(path, None, ("ill",))
    moved.write_text("target = [")
    with pytest.raises(ConfigError, match="cannot be read as TOML"):
        read_schema(path, moved)


def test_a_draft_needs_a_target() -> None:
    with pytest.raises(ConfigError, match=r"target z is no column of t.csv: it has a"):
        draft("t.csv", {"a": "number"}, ["z"], "classification")
    assert schema.is_own(Path("x.CSV")) and not schema.is_own(Path("x.npz"))
