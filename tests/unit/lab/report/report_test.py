"""Reports come from rows alone, and are always the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.experiments import TOY, made_row, pretend, written
from tests.support.program import plain, run, run_json
from vestige.lab import catalogue, report
from vestige.lab.definition import Experiment
from vestige.lab.grid import tasks_of
from vestige.lab.rows import ROWS, Rows
from vestige.lab.summary import rows_of, summarised


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_reports_come_from_rows_alone_and_are_the_same_bytes(tmp_path: Path) -> None:
    experiment = catalogue.find("fo-tab3")
    for place in ("a/results", "b/results"):
        pretend(experiment, tmp_path / place)
        rows = (tmp_path / place / ROWS).read_text().splitlines()
        if place.startswith("b"):  # the order in which workers finished does not matter
            (tmp_path / place / ROWS).write_text("\n".join(reversed(rows)) + "\n")
        result = run("report", str(tmp_path / place / "fo-tab3"))
        assert result.exit_code == 0, result.output
    for name in ("table.md", "table.json"):
        first = (tmp_path / "a/results/fo-tab3" / name).read_bytes()
        assert first == (tmp_path / "b/results/fo-tab3" / name).read_bytes()
        run("report", str(tmp_path / "a/results"))
        assert first == (tmp_path / "a/results/fo-tab3" / name).read_bytes()
    page = (tmp_path / "a/results/fo-tab3/table.md").read_text()
    assert "`vestige report results/fo-tab3`" in page
    assert "`vestige reproduce fo-tab3`" in page
    assert "0.3654 ± 0.0075 [0.3560, 0.3748]" in page
    assert "Holm's correction for 11 comparisons" in page
    assert "## Fair" in page and "epsilon 17.44" in page
    assert all(sentence in page for sentence in experiment.assumed)
    json.loads((tmp_path / "a/results/fo-tab3/table.json").read_text(), parse_constant=pytest.fail)


def test_a_report_says_what_is_missing(tmp_path: Path, toy: Experiment) -> None:
    pretend(toy, tmp_path)
    whole = (tmp_path / ROWS).read_bytes().splitlines(keepends=True)
    (tmp_path / ROWS).write_bytes(b"".join(whole[:-1]))
    rows = Rows(tmp_path).refresh()
    report.write_found(toy, rows, tmp_path / "toy")
    assert "| 1/2 |" in (tmp_path / "toy" / "table.md").read_text()
    numbers = summarised(toy, rows_of(toy, rows))
    assert [line["count"] for line in numbers["published"][0]["lines"]] == [2, 1]


@pytest.mark.parametrize("place", ["nowhere", "results", "results/fo-tab9"])
def test_report_of_no_results(tmp_path: Path, place: str) -> None:
    (tmp_path / "results").mkdir()
    if place.endswith("9"):
        (tmp_path / "results" / ROWS).write_text("")
    result = run("report", str(tmp_path / place))
    assert result.exit_code == 2
    assert len(result.stderr.strip().splitlines()) == 1


def test_report_of_an_experiment_without_rows(tmp_path: Path) -> None:
    (tmp_path / ROWS).write_text("")
    result = run("report", str(tmp_path / "fo-tab3"))
    assert result.exit_code == 2
    assert "vestige reproduce fo-tab3" in plain(result.stderr)


def test_report_of_results_from_the_command_line(tmp_path: Path) -> None:
    experiment = catalogue.find("sma-tab3")
    root = tmp_path / "results"
    root.mkdir()
    lines = [json.dumps(made_row(task)) for task in tasks_of(experiment, {})]
    (root / ROWS).write_text("".join(f"{line}\n" for line in lines))
    found = run_json("report", str(root / "sma-tab3"))
    names = [Path(name).name for name in found["files"]]
    assert found["kind"] == "experiments"
    assert names == ["table.md", "table.json", "depth-by-interval.svg", "report.html"]
    first = {name: (root / "sma-tab3" / name).read_bytes() for name in names}
    assert run("report", str(root / "sma-tab3")).exit_code == 0
    assert first == {name: (root / "sma-tab3" / name).read_bytes() for name in names}
    broken = json.loads(lines[0])
    broken["curve"].pop("accuracy")
    (root / ROWS).write_text("".join(f"{line}\n" for line in [json.dumps(broken), *lines[1:]]))
    result = run("report", str(root / "sma-tab3"))
    assert result.exit_code == 2
    assert f"the row {broken['hash']} ([1, 3]) cannot be reported" in result.stderr


def test_a_report_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot be written.*untouched"):
        report.write_files(tmp_path / "file" / "toy", {"report.html": ""})
