"""A run folder is read whole, or refused by the name of what is damaged."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.program import run
from vestige.lab.report.run_data import is_run, read_run, trained_layers


def test_a_run_is_read(folder: Path) -> None:
    found = read_run(folder)
    assert is_run(folder) and not is_run(folder.parent) and found.name == "sma"
    assert found.memory is not None and found.memory["epoch"] == [1, 2]
    assert len(found.memory["depth"][0]) == len(found.memory["groups"])
    assert [layer.name for layer in trained_layers(folder, {})]
    (folder / "model.pt").write_bytes(b"no weights")
    assert trained_layers(folder, {}) == ()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("result.json", None, "has no result.json: the run did not finish"),
        ("metrics.jsonl", None, "has no metrics.jsonl"),
        ("result.json", "{", "this is no JSON; train again, or restore the file"),
        ("result.json", "[]", "this is no JSON object"),
        ("result.json", "{}", "method is missing"),
        ("config.json", "\x00", "this is no JSON"),
        ("metrics.jsonl", '{"step": 1', "line 1: this is no JSON"),
        ("metrics.jsonl", '{"step": 1}', "line 1: epoch is missing"),
        (
            "metrics.jsonl",
            '{"step": 1, "epoch": "one", "epsilon": 1, "test_loss": 1, "test_accuracy": 1}',
            "epoch is 'one'",
        ),
        (
            "metrics.jsonl",
            '{"step": 1, "epoch": 1, "epsilon": 1, "test_loss": 1, "test_accuracy": 1, '
            '"diagnostics": {"groups": ["a"], "rho": [1.0]}}',
            "its diagnostics are not one number for each step and group",
        ),
    ],
)
def test_a_damaged_run_folder_is_named(
    name: str, content: str | None, words: str, folder: Path
) -> None:
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    result = run("report", str(folder))
    assert result.exit_code == 2 and result.stderr.count("\n") == 1
    assert words in result.stderr and "vestige: error" in result.stderr
