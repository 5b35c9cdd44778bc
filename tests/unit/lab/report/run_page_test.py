"""Pages of runs."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from tests.support.experiments import HOSTILE
from tests.support.own_tables import write_table
from tests.support.pages import check_page, downloads, order
from tests.support.program import run, run_json
from vestige.checks import round_up
from vestige.lab import report
from vestige.lab.report.run_data import read_run
from vestige.lab.report.run_page import train_command


def test_the_page_of_a_run(runs: Path) -> None:
    found = run_json("report", str(runs / "sma"))
    assert found["kind"] == "run"
    names = [Path(name).name for name in found["files"]]
    assert names == ["training.svg", "memory.svg", "spectra.svg", "report.html"]
    content = (runs / "sma" / "report.html").read_text()
    reader = check_page(content)
    order(content, "guarantee", "settings", "curves", "memory", "numbers")
    result = json.loads((runs / "sma" / "result.json").read_text())
    assert f"epsilon {round_up(result['epsilon'])}, delta 1e-05" in reader.text
    for words in (
        *result["caveats"],
        "add or remove one record",
        "Accountant: PLD",
        "papers' figure (diagnostic)",
        f"{result['accuracy']:.2%}",
        "hidden1",
        "Power-law exponents of the trained weights",
    ):
        assert words in reader.text, words
    # Where it lay is not told, and neither is the secret seed.
    everything = content + "".join(v.decode() for v in downloads(reader).values())
    assert str(runs) not in everything and "271828182" not in everything


def test_reports_of_a_run_are_the_same_bytes(runs: Path, folder: Path) -> None:
    first = {path.name: path.read_bytes() for path in report.write_run(folder)}
    other = Path(shutil.copytree(folder, folder.parent.parent / "else" / "runs" / "sma"))
    assert first == {path.name: path.read_bytes() for path in report.write_run(other)}
    for path in runs.joinpath("sma").iterdir():  # nothing else was touched
        if path.name in ("config.json", "metrics.jsonl", "result.json", "model.pt"):
            assert path.read_bytes() == (folder / path.name).read_bytes()


def test_a_run_without_a_guarantee(runs: Path) -> None:
    assert run("report", str(runs / "geodp")).exit_code == 0
    reader = check_page((runs / "geodp" / "report.html").read_text())
    assert "No guarantee Epsilon is infinite" in reader.text
    assert "training loss, outside the guarantee" in reader.text
    assert "There is no epsilon to draw" in reader.text
    assert "papers' figure" not in reader.text


def test_the_command_in_the_page_trains_the_same(runs: Path, tmp_path: Path) -> None:
    command = train_command(read_run(runs / "sma"))
    assert command is not None and "--set alpha=0.6" in command and "interval" not in command
    words = shlex.split(command)[1:]
    again = run_json(
        words[0], *words[1:], "--noise-seed", "271828182", "--out", str(tmp_path / "again")
    )
    result = json.loads((runs / "sma" / "result.json").read_text())
    changing = ("folder", "seconds")
    assert {k: v for k, v in again.items() if k not in changing} == {
        k: v for k, v in result.items() if k not in changing
    }


def test_a_run_that_was_interrupted(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text()) | {"interrupted": True}
    (folder / "result.json").write_text(json.dumps(result))
    (folder / "metrics.jsonl").write_text("")
    (folder / "model.pt").unlink()
    report.write_run(folder)
    reader = check_page((folder / "report.html").read_text())
    assert "This run was interrupted" in reader.text
    assert "ended before its first epoch did" in reader.text


def test_a_run_with_a_hostile_dataset(folder: Path) -> None:
    for name in ("result.json", "config.json"):
        values = json.loads((folder / name).read_text())
        values |= {"dataset": f"/secret/place/{HOSTILE}", "method": "none of ours"}
        values["caveats"] = [HOSTILE]
        (folder / name).write_text(json.dumps(values))
    (folder / "model.pt").write_bytes(b"no weights")
    report.write_run(folder)
    content = (folder / "report.html").read_text()
    assert HOSTILE in check_page(content).text and "<script" not in content


def test_classes_have_their_names_and_the_command_is_one_that_was_typed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_table(Path("t.csv"))
    few = "--epsilon 3 --lot 8 --steps 2 --accountant rdp --out first"
    assert run(f"train --data t.csv {few}").exit_code == 0
    reader = check_page(Path("first/report.html").read_text())
    assert "class no yes no " in reader.text and "vestige report first" in reader.text
    Path("first/model.json").write_text("{}")
    report.write_run(Path("first"))
    assert "class 0 1 0 " in check_page(Path("first/report.html").read_text()).text
