"""`vestige schema`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.own_tables import write_table
from tests.support.program import check_refused, run

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_a_draft_is_written_and_what_is_to_declare_is_said() -> None:
    write_table(Path("t.csv"))
    Path("t.schema.toml").unlink()
    result = run("schema t.csv --target ill")
    assert result.exit_code == 0
    assert "wrote t.schema.toml: a draft without any value of the data" in result.stdout
    assert "complete each line that says DECLARE" in result.stdout
    assert "--dataset-size" in result.stdout
    assert "[columns.age]" in Path("t.schema.toml").read_text()
    check_refused(run("schema t.csv --target ill"), "is there already")
    check_refused(run("train --data t.csv"), "undeclared are range of age, categories of town")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("t.csv", "no target is named: say what is to be predicted, --target COLUMN; t.csv has "),
        ("empty.csv --target x", "empty.csv is empty: its first line must name the columns"),
        ("names.csv --target a", "names.csv has a line of names and no record"),
        ("t.csv --target il", "target il is no column"),
        ("none.csv --target x", "is no CSV or parquet file and no folder"),
        ("t.csv --target ill --task rank", "task 'rank' is unknown"),
    ],
)
def test_a_bad_request_is_one_line(arguments: str, message: str) -> None:
    write_table(Path("t.csv"))
    Path("t.schema.toml").unlink()
    Path("empty.csv").write_text("")
    Path("names.csv").write_text("a,b\n")
    check_refused(run(f"schema {arguments}"), message)
    assert not Path("t.schema.toml").exists()
