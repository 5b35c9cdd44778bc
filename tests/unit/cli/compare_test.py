"""The command compare."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.own_tables import write_table
from tests.support.pages import check_page
from tests.support.program import check_refused, plain, run, run_json
from vestige.privacy import accounting, ledger_file


def test_compare_on_the_command_line() -> None:
    options = "--dataset digits --model linear --lot 100 --epochs 1 --train-size 300 --seeds 2"
    shown = plain(run(f"compare --methods dp-sgd,fo --epsilon 2 {options}").stdout)
    assert "whole study" in shown and "p (Holm)" in shown
    report = run_json(f"compare --methods dp-sgd,fo --epsilon 2 {options}")
    assert report["study_epsilon"] > 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ("--methods dp-sgd --epsilon 1", "at least two"),
        ("--methods dp-sgd,dp-sgd --epsilon 1", "different"),
        ("--methods dp-sgd,foo --epsilon 1", "'foo'"),
        ("--methods dp-sgd,fo --epsilon 0", "epsilon"),
        ("--methods dp-sgd,fo --epsilon 1 --match noise", "'noise'"),
        ("--methods dp-sgd,fo --epsilon 1 --seeds 0", "seeds"),
        ("--methods dp-sgd,fo --epsilon 1 --tune --lr 1", "tune"),
        ("--methods dp-sgd,fo --epsilon 1 --dataset nothing.npz", "nothing.npz"),
    ],
)
def test_bad_comparisons(options: str, expected: str) -> None:
    result = run(f"compare {options}")
    assert result.exit_code == 2
    assert expected in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.usefixtures("empty_folder")
def test_a_comparison_keeps_its_report_its_page_and_its_ledger() -> None:
    options = "--model linear --lot 100 --epochs 1 --train-size 300 --seeds 2"
    line = f"compare --methods dp-sgd,fo --epsilon 2 {options}"
    shown = run(f"{line} --out study", COLUMNS="80", FORCE_COLOR="1")
    assert shown.exit_code == 0, shown.output
    lines = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown.stdout).splitlines()
    assert max(map(len, lines)) <= 80
    table = [line for line in lines if line.startswith(("method", "dp-sgd", "fo"))]
    assert len(table) == 3  # nothing is folded
    assert "vestige.load('study/runs/" in plain(shown.stdout)
    report = json.loads(Path("study/comparison.json").read_text())
    content = ledger_file.read(Path("study/ledger.jsonl"))
    assert sum(event.count for event in content.events) == 4 * 3
    assert accounting.epsilon(content.events, 1e-5) == report["study_epsilon"]
    assert report["ledger_epsilon"] == report["study_epsilon"]
    for run_ in report["runs"]:  # of one run, whatever else is on the ledger
        assert run_["epsilon"] == pytest.approx(2.0, rel=2e-3)
    page = check_page(Path("study/report.html").read_text())
    assert "The whole study" in page.text and "p (Holm)" in page.text
    # The same command again reads what is there; another study is refused.
    before = Path("study/ledger.jsonl").read_bytes()
    assert json.loads(run(f"{line} --out study --json").stdout) == report
    assert Path("study/ledger.jsonl").read_bytes() == before
    check_refused(run(f"{line} --out study --lr 1"), "holds another study: its lr is None and not")
    # A second study on the same ledger: what was there before counts on it, not in the study.
    again = run_json(f"{line} --ledger study/ledger.jsonl")
    assert again["ledger_epsilon"] > again["study_epsilon"]
    assert again["study_epsilon"] == pytest.approx(report["study_epsilon"], rel=1e-3)


@pytest.mark.usefixtures("empty_folder")
def test_own_data_is_compared_on_classes_and_not_on_numbers() -> None:
    write_table(Path("t.csv"))
    line = (
        "compare --data t.csv --methods dp-sgd,fo --epsilon 3 --lot 8 --epochs 1 --seeds 1 "
        "--accountant rdp"
    )
    assert run_json(line)["dataset"] == "t.csv"
    write_table(Path("t.csv"), task="regression", target='"days"')
    check_refused(run(line), "is for regression, and a comparison tests accuracies")


def test_a_terminal_that_knows_ascii_alone_gets_its_table() -> None:
    options = "--model linear --lot 100 --epochs 1 --train-size 300 --seeds 1 --accountant rdp"
    line = f"-m vestige compare --methods dp-sgd,fo --epsilon 2 {options}"
    ran = subprocess.run(
        [sys.executable, *line.split()],
        capture_output=True,
        env=os.environ | {"PYTHONIOENCODING": "ascii", "FORCE_COLOR": "1"},
    )
    assert ran.returncode == 0, ran.stderr
    assert b"whole study" in ran.stdout and ran.stdout.isascii()
