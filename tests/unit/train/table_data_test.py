"""Tables: each row becomes numbers by itself, by declared ranges and categories alone."""

from __future__ import annotations

from datetime import UTC, date, datetime
from pathlib import Path

import numpy as np
import pytest

from tests.support.own_tables import rows, write_table
from vestige.errors import ConfigError
from vestige.train import table_data
from vestige.train.schema import Schema, read_schema, restored


def small(**changes: object) -> Schema:
    facts = {
        "target": "y",
        "columns": {
            "a": {"kind": "number", "range": [10, 20]},
            "c": {"kind": "category", "categories": ["u", "v"]},
            "y": {"kind": "category", "categories": ["0", "1"]},
        },
    }
    return restored(facts | changes)


def test_numbers_are_clipped_to_the_declared_range_and_scaled_by_it() -> None:
    table = {"a": ["10", "15", "20", "-5", "99", "", None, "nan"], "c": ["u"] * 8}
    x = table_data.encode(small(), table)
    assert x[:, 0].tolist() == [-1, 0, 1, -1, 1, 0, 0, 0]


@pytest.mark.parametrize("cell", ["52000 EUR", "1,5", "x", "inf"])
def test_text_in_the_place_of_a_number_is_refused_or_left_out(cell: str) -> None:
    table = {"a": ["10", cell, ""], "c": ["u"] * 3}
    words = "the a of record 2 is no number: write numbers with a decimal point"
    with pytest.raises(ConfigError, match=words) as refused:
        table_data.encode(small(), table)
    assert cell not in str(refused.value).split() and "drop" not in str(refused.value)
    with pytest.raises(ConfigError, match=f'{words}.* unknown = "drop"'):
        table_data.encode(small(), table, training=True)
    x = table_data.encode(small(unknown="drop"), table, training=True)
    assert np.isnan(x).any(axis=1).tolist() == [False, True, False]
    with pytest.raises(ConfigError, match=words):  # every record is to have a prediction
        table_data.encode(small(unknown="drop"), table)


def test_dates_are_clipped_to_the_declared_range_and_scaled_by_it() -> None:
    columns: dict[str, dict[str, object]] = {
        "d": {"kind": "date", "range": ["2020-01-01", "2020-01-03"]},
        "y": {"kind": "category", "categories": ["0", "1"]},
    }
    schema = restored({"target": "y", "columns": columns})
    cells = ["2020-01-01", "2020-01-02 12:00", date(2020, 1, 3), "2031-01-01", "", None]
    zoned = datetime(2020, 1, 2, tzinfo=UTC)
    x = table_data.encode(schema, {"d": [*cells, zoned]})
    assert x[:, 0].tolist() == [-1, 0.5, 1, 1, 0, 0, 0] and table_data.width(schema) == 1
    assert table_data.kinds({"d": cells, "e": ["", "1.2.2020"]}) == {"d": "date", "e": "category"}
    for cell in ("31.12.2020", "yesterday", 7):
        with pytest.raises(ConfigError, match="the d of record 2 is no date: write dates as 2015"):
            table_data.encode(schema, {"d": ["2020-01-01", cell]})
    columns["d"]["missing"] = "2020-01-03"
    schema = restored({"target": "y", "columns": columns})
    assert table_data.encode(schema, {"d": [""]}).tolist() == [[1]]


def test_categories_of_which_no_record_has_any_are_refused_in_training() -> None:
    table = {"a": [15] * 2, "c": ["U", "V"]}
    with pytest.raises(ConfigError, match=r"no record has one .* of c, .* \(u, v\) as the file"):
        table_data.encode(small(), table, training=True)
    with pytest.warns(UserWarning, match="no record has one .* of c: all count as other"):
        x = table_data.encode(small(), table)
    assert x[:, 1:].tolist() == [[0, 0, 1]] * 2
    empty = {"a": [15] * 2, "c": ["", None]}
    assert table_data.encode(small(), empty, training=True)[:, 3].tolist() == [1, 1]


def test_a_draft_calls_numbers_with_gaps_numbers() -> None:
    table = {"a": ["1", "", "nan"], "b": ["1", "5 kg"], "c": [1.0, None]}
    assert table_data.kinds(table) == {"a": "number", "b": "category", "c": "number"}


def test_a_missing_number_is_the_declared_one() -> None:
    schema = small(
        columns={
            "a": {"kind": "number", "range": [0, 10], "missing": 10},
            "y": {"kind": "category", "categories": ["0", "1"]},
        }
    )
    assert table_data.encode(schema, {"a": ["", None]}).tolist() == [[1], [1]]


def test_categories_are_one_hot_and_all_else_is_other() -> None:
    table = {"a": [15] * 4, "c": ["u", "v", "w", ""]}
    x = table_data.encode(small(), table)
    assert x[:, 1:].tolist() == [[1, 0, 0], [0, 1, 0], [0, 0, 1], [0, 0, 1]]
    assert x.shape[1] == table_data.width(small())


def test_another_record_changes_neither_the_numbers_nor_the_split_of_the_others() -> None:
    schema = small()
    generator = np.random.default_rng(1)
    table = {
        "a": generator.normal(15, 3, 200).tolist(),
        "c": generator.choice(["u", "v"], 200).tolist(),
        "y": generator.choice(["0", "1"], 200).tolist(),
    }
    extreme = {"a": [1e9, *table["a"]], "c": ["rare", *table["c"]], "y": ["1", *table["y"]]}
    splits = []
    for one in (table, extreme):
        splits.append(table_data.in_held_out(table_data.row_bytes(one), 0.2))
    assert (table_data.encode(schema, extreme)[1:] == table_data.encode(schema, table)).all()
    assert (splits[1][1:] == splits[0]).all()
    assert 20 < splits[0].sum() < 60


def test_a_record_without_a_known_class_is_refused_or_left_out() -> None:
    table = {"y": ["0", "1", "2", ""]}
    with pytest.raises(ConfigError, match=r"record 3 has no known y: declare .*unknown = \"drop\""):
        table_data.targets(small(), table)
    y, known = table_data.targets(small(unknown="drop"), table)
    assert known.tolist() == [True, True, False, False]
    assert y[known].tolist() == [0, 1]


def test_targets_of_each_task(tmp_path: Path) -> None:
    table = {name: [row[name] for row in rows()] for name in rows()[0]}
    path = write_table(tmp_path / "a.csv", task="multi-label", target='["ill", "tall"]')
    y, _ = table_data.targets(read_schema(path, None), table)
    assert y.shape == (80, 2) and set(y.ravel().tolist()) == {0, 1}
    path = write_table(tmp_path / "b.csv", task="regression", target='"days"')
    y, _ = table_data.targets(read_schema(path, None), table)
    assert y[:, 0] == pytest.approx([max(-1, row["days"] / 20 - 1) for row in rows()])


def test_a_file_is_read_with_any_of_the_usual_delimiters(tmp_path: Path) -> None:
    for sign in ",;\t":
        path = tmp_path / "t.csv"
        path.write_text(f'\ufeffa{sign}"b c"\n1{sign}x\n\n2{sign}"y{sign}z"\n', encoding="utf-8")
        assert table_data.read_table(path) == {"a": ["1", "2"], "b c": ["x", f"y{sign}z"]}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1\n", "line 2 of .* has 1 cells and the first line 2"),
        ("a,a\n1,2\n", "must name every column once"),
        ("a,\n1,2\n", "must name every column once"),
    ],
)
def test_a_damaged_table_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ConfigError, match=message):
        table_data.read_table(tmp_path / "t.csv")


def test_a_file_that_is_not_there_is_refused_by_name(tmp_path: Path) -> None:
    for name in ("t.csv", "t.parquet"):
        with pytest.raises(ConfigError, match=f"{name}' does not exist: check the path"):
            table_data.read_table(tmp_path / name)


def test_no_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_bytes(b"a,b\n\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        table_data.read_table(tmp_path / "t.csv")


def test_parquet_is_read_like_csv(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    columns = {"a": [1.0, None, 12.5], "c": ["u", "v", None], "y": [1, 0, 1]}
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    table = table_data.read_table(tmp_path / "t.parquet")
    assert table == columns
    y, known = table_data.targets(small(), table)
    assert (y.tolist(), known.all()) == ([1, 0, 1], True)
    (tmp_path / "bad.parquet").write_bytes(b"none")
    with pytest.raises(ConfigError, match="cannot be read"):
        table_data.read_table(tmp_path / "bad.parquet")


def test_parquet_without_its_reader_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow.*pip install 'vestige-dp\[data\]'"):
        table_data.read_table(tmp_path / "t.parquet")


def test_a_missing_column_is_named() -> None:
    with pytest.raises(ConfigError, match="no column 'c' in the data: it has a"):
        table_data.encode(small(), {"a": [1]})
