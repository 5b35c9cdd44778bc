"""The audit table: its files, and the part on rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from vestige import ConfigError
from vestige.audit.table import write_rows, write_table


def test_the_table_has_a_row_for_each_method(tmp_path):
    made = write_table(tmp_path / "out", ["disk", "geodp"], 2.0, 300, 3, "a command")
    assert [path.name for path in made] == ["audit.json", "table.md", "geodp.png"]
    numbers = json.loads(made[0].read_text())
    assert [row["method"] for row in numbers["methods"]] == ["disk", "geodp"]
    assert numbers["command"] == "a command" and numbers["teeth"] == []
    text = made[1].read_text()
    assert "| disk | 2.00 |" in text and text.count("violated") == 2
    assert [row["violated"] for row in numbers["rows"]] == [True, False]
    assert "| mis-attributed rows | 0.44 | **" in text
    assert "| geodp | none; published 2.00 | **" in text
    assert numbers["methods"][0]["confidence"] == pytest.approx(1 - 0.05 / 4)
    with pytest.raises(ConfigError, match="unknown"):
        write_table(tmp_path / "t.md", ["nope"], 2.0, 300, 3, "")
    with pytest.raises(ConfigError, match="must be a folder"):
        write_table(tmp_path / "t.txt", ["disk"], 2.0, 300, 3, "")


def test_the_part_on_rows_is_made_anew_and_nothing_else_changes(tmp_path):
    text = "a table\n\n| row |\n"
    numbers = {"command": "an earlier one", "methods": [{"epsilon_lower": 0.1 + 0.2}], "teeth": []}
    (tmp_path / "table.md").write_text(text)
    with pytest.raises(ConfigError, match="make the whole table first"):
        write_rows(tmp_path, 100, 3, "a command")
    (tmp_path / "audit.json").write_text(json.dumps(numbers, indent=2) + "\n")
    for command in ("a command", "another"):
        write_rows(tmp_path, 100, 3, command)
        now = (tmp_path / "table.md").read_text()
        assert now.startswith(text) and now.count("| mis-attributed rows |") == 1
        assert f"`{command}`" in now
        kept = (tmp_path / "audit.json").read_text()
        assert kept.startswith(json.dumps(numbers, indent=2).removesuffix("\n}"))
        assert json.loads(kept)["rows_command"] == command


def test_the_table_that_is_kept_has_mis_attributed_rows():
    kept = Path(__file__).parents[3] / "results" / "audit"
    broken, whole = json.loads((kept / "audit.json").read_text())["rows"]
    assert broken["method"] == "mis-attributed rows" and broken["violated"]
    assert broken["epsilon_lower"] > 3 > 1 > broken["epsilon_claimed"]
    assert whole["epsilon_claimed"] == broken["epsilon_claimed"] and not whole["violated"]
    assert "| mis-attributed rows | 0.44 | **" in (kept / "table.md").read_text()
