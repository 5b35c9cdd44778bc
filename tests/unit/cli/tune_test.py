"""The command tune."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest

from tests.support.own_tables import write_table
from tests.support.program import check_refused, plain, run, run_json
from tests.support.searches import LINE, number_of_trials
from vestige.train.tune import trial

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_tune_on_the_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    number_of_trials(monkeypatch, 2)
    shown = run(f"{LINE} --epsilon 4 --trials 3 --out a")
    told = plain(shown.stdout)
    assert "chosen lr " in told and "privacy (epsilon 4.00, delta 1e-05)" in told
    assert "3 trials on average" in told and "not a claim" in told
    assert [line for line in shown.stderr.splitlines() if not line.startswith("vestige: ")] == [
        "loading digits",
        "accounting",
        "building every candidate once",
        "charging the search",
        "searching; how many trials there are is secret",
        "writing the winner",
    ]
    assert "private search, eta 0, gamma" in run("ledger show a").stdout
    report = run_json(f"{LINE} --noise-multiplier 2 --eta 1 --ledger a/ledger.jsonl")
    assert report["epsilon"] > 4 and report["search"]["eta"] == 1
    Path("c.toml").write_text("[[candidate]]\nlr = 0.1\n[[candidate]]\nlr = 0.5\n")
    line = LINE.partition(" --try")[0]
    assert run_json(f"{line} --candidates c.toml")["chosen"]["lr"] in (0.1, 0.5)


def test_own_data_and_its_noisy_score(monkeypatch: pytest.MonkeyPatch) -> None:
    number_of_trials(monkeypatch, 1)
    write_table(Path("t.csv"))
    line = "tune --data t.csv --lot 8 --steps 2 --try lr=0.1,0.5 --evaluate-epsilon 3"
    shown = plain(run(line).stdout)
    assert "with noise; may be published" in shown
    assert run_json(line)["held_out_release"]["epsilon"] <= 3


def test_an_interrupt_is_answered_at_once_and_the_search_stays_charged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real = trial._outcome

    def outcome(*args: Any) -> Any:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    monkeypatch.setattr(trial, "_outcome", outcome)
    number_of_trials(monkeypatch, 2)
    for more, remedy in (("", "begin a new one with --ledger runs/"), ("--out a", "same command")):
        stopped = run(f"{LINE} {more}")
        assert stopped.exit_code == 130 and stopped.stdout == ""
        assert "stays charged" in stopped.stderr and remedy in stopped.stderr
    assert [path.name for path in Path("a").iterdir()] == ["ledger.jsonl"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "--try NAME=VALUES or as --candidates FILE"),
        ("--try lr=1,2 --candidates c.toml", "--try NAME=VALUES or as --candidates FILE"),
        ("--try lr", "--try 'lr' is not of the form"),
        ("--try lr=1 --try lr=2", "--try lr is given twice"),
        ("--try lr=1", "1 candidates"),
        ("--try lr=1,2 --trials 1", "trials 1.0"),
        ("--try lr=1,2 --eta -1", "eta -1.0"),
        ("--try lr=1,2 --eta 11", "eta"),
        ("--try lr=1,2 --method geodp --set bounding=0.1", "'geodp' has no guarantee"),
        ("--try lr=1,2 --epsilon 1 --noise-multiplier 1", "both given"),
        ("--try lr=1,2 --noise-multiplier 0", "no Rényi curve"),
        ("--try lr=1,2 --data t.csv", "--evaluate-epsilon"),
    ],
)
def test_bad_searches_are_refused_in_a_line(options: str, message: str) -> None:
    write_table(Path("t.csv"))
    check_refused(run(f"tune {options} --json"), message)
    assert not Path("runs").exists()
