"""`vestige demo`: three methods, one epsilon, their pages and statements."""

from __future__ import annotations

from pathlib import Path

from tests.support.program import run, run_json


def test_three_methods_at_the_same_epsilon_with_their_pages(tmp_path: Path) -> None:
    out = tmp_path / "demo"
    told = run_json("demo", "--epochs", "1", "--epsilon", "2", "--out", str(out))
    assert [one["method"] for one in told["runs"]] == ["dp-sgd", "fo", "sma"]
    for one in told["runs"]:
        assert 1.9 < one["epsilon"] <= 2.0
        for name in ("report.html", "statement.html", "statement.json", "model.pt"):
            assert (out / one["method"] / name).is_file()


def test_a_folder_with_something_in_it_is_refused_before_anything_runs(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    done = run("demo", "--out", str(tmp_path / "full"))
    assert done.exit_code == 2 and "full" in done.stderr
