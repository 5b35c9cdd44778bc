"""The command reproduce."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import (
    TOY,
    full_row,
    stored,
    written,
)
from tests.support.program import plain, run, run_json
from vestige.lab.definition import Experiment
from vestige.lab.rows import ROWS


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_a_full_disk_is_one_line_on_the_command_line(
    tmp_path: Path, toy: Experiment, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = os.write, tmp_path / "out"

    def full(file: int, data: Any) -> int:
        rows = Path(f"/proc/self/fd/{file}").readlink().name == ROWS
        if rows and len(stored(out)) >= 2:
            raise OSError(28, "No space left on device")
        return real(file, data)

    monkeypatch.setattr("vestige.lab.rows.os.write", full)
    monkeypatch.setattr("vestige.lab.training_row.make_row", lambda t, *_: full_row(t))
    result = run("reproduce", str(toy.path), "--out", str(out))
    assert result.exit_code == 1
    assert "No space left" in plain(result.stderr) and "free some space" in plain(result.stderr)
    assert "2 of 4 rows" in plain(result.stdout) and "continue with" in plain(result.stdout)
    monkeypatch.setattr("vestige.lab.rows.os.write", real)
    assert run("reproduce", str(toy.path), "--out", str(out)).exit_code == 0
    assert Counter(row["hash"] for row in stored(out)).most_common(1)[0][1] == 1
    assert len(stored(out)) == 4


def test_reproduce_as_json(tmp_path: Path, toy: Experiment) -> None:
    report = run_json("reproduce", str(toy.path), "--out", str(tmp_path / "out"))
    assert (report["total"], report["finished"], report["smoke_run"]) == (4, 4, False)
    assert (tmp_path / "out" / "toy" / "table.md").is_file()
