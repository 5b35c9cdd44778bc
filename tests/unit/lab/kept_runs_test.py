"""A comparison in a folder: it goes on after Ctrl-C, and its models can be loaded."""

from __future__ import annotations

import json
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from vestige import load
from vestige.errors import ConfigError
from vestige.lab import comparison
from vestige.privacy import accounting, ledger_file
from vestige.privacy.events import counts
from vestige.statement import read
from vestige.train.config import TrainConfig
from vestige.train.training import Progress

pytestmark = pytest.mark.usefixtures("empty_folder")


@pytest.fixture
def study() -> comparison.Study:
    base = TrainConfig(
        model="linear", lot=100, epochs=2, train_size=400, test_size=50, accountant="rdp"
    )
    return comparison.Study(("dp-sgd", "fo"), epsilon=2.0, base=base, seeds=2, out=Path("study"))


class Presses:
    """Presses Ctrl-C at a release of the run whose name begins so; notes what was trained."""

    def __init__(self, name: str = "", step: int = 0) -> None:
        self.name, self.step, self.trained = name, step, set[str]()

    def __call__(self, name: str, progress: Progress) -> None:
        if progress.step:
            self.trained.add(name)
        if self.name and name.startswith(self.name) and progress.step == self.step:
            self.name = ""
            signal.raise_signal(signal.SIGINT)


def on_ledger() -> Any:
    return counts(ledger_file.read(Path("study/ledger.jsonl")).events)


def test_every_run_leaves_a_model_and_a_statement(study: comparison.Study) -> None:
    report = comparison.compare(study)
    assert [run["folder"] for run in report["runs"]] == [
        f"runs/{method}-final-seed-{seed}" for method in ("dp-sgd", "fo") for seed in (0, 1)
    ]
    for run in report["runs"]:
        home = Path("study", run["folder"])
        assert load(home)(torch.zeros(1, 1, 8, 8)).shape == (1, 10)
        stated = read(home)
        assert "one of 4 runs of a comparison" in str(stated["not_covered"])
        assert stated["guarantee"]["this_run_alone"] == pytest.approx(run["epsilon"])
        assert run["epsilon"] == pytest.approx(2.0, rel=2e-3)
    # The last run's claim is over all that the ledger holds: the whole study.
    assert stated["guarantee"]["epsilon"] == report["study_epsilon"] == report["ledger_epsilon"]


@pytest.mark.parametrize("where", [("dp-sgd, final, seed 0", 3), ("fo, final, seed 1", 8)])
def test_it_goes_on_after_ctrl_c_and_charges_nothing_twice(
    study: comparison.Study, where: tuple[str, int]
) -> None:
    first = Presses(*where)
    stopped = comparison.compare(study, first)
    assert stopped["interrupted"] is (where[1] != 8)  # the last lot of all was made
    # What was planned and not made counts, because whoever stops may have looked.
    done = [run for run in stopped["runs"] if not run["interrupted"]]
    second = Presses()
    report = comparison.compare(study, second)
    assert not report["interrupted"] and report["study_runs"] == 4
    assert len(first.trained) + len(second.trained) == 4 + (where[1] != 8)
    assert [run for run in report["runs"] if run in done] == done
    assert sum(on_ledger().values()) == 4 * 8
    events = ledger_file.read(Path("study/ledger.jsonl")).events
    assert report["study_epsilon"] == accounting.epsilon(events, 1e-5, "rdp")
    assert report["ledger_epsilon"] == report["study_epsilon"]


def test_a_finished_study_is_read_and_not_trained(study: comparison.Study) -> None:
    report = comparison.compare(study)
    before = Path("study/ledger.jsonl").read_bytes()
    again = Presses()
    assert comparison.compare(study, again) == report
    assert not again.trained and Path("study/ledger.jsonl").read_bytes() == before


def test_tuning_goes_on_with_the_records_that_it_was_begun_with(study: comparison.Study) -> None:
    study = replace(study, tune=True, seeds=1, match="sigma")
    stopped = comparison.compare(study, Presses("fo, tuning", 2))
    assert stopped["interrupted"] and stopped["study_runs"] == 6
    report = comparison.compare(study)
    assert not report["interrupted"] and report["study_runs"] == study.runs == 10
    assert report["runs"][:5] == stopped["runs"][:5]


def test_ctrl_c_between_two_runs_loses_nothing(study: comparison.Study) -> None:
    stopped = comparison.compare(study, Presses("dp-sgd, final, seed 0", 8))
    assert stopped["interrupted"] and stopped["study_runs"] == 1
    assert not stopped["runs"][0]["interrupted"]


def test_another_study_does_not_go_on_there(study: comparison.Study) -> None:
    comparison.compare(study, Presses("dp-sgd", 1))
    for changes, told in (
        ({"seeds": 3}, r"its seeds is 2 and not 3"),
        ({"base": study.base.changed(epochs=3)}, r"its epochs is 2 and not 3"),
        ({"ledger": Path("other.jsonl")}, r"its ledger is None and not"),
    ):
        with pytest.raises(ConfigError, match=told):
            comparison.compare(replace(study, **changes))
    Path("study/study.json").write_text("[")
    with pytest.raises(ConfigError, match="is damaged"):
        comparison.compare(study)
    Path("mine").mkdir()
    Path("mine/file").write_text("x")
    with pytest.raises(ConfigError, match="is in use"):
        comparison.compare(replace(study, out=Path("mine")))


def test_what_the_folder_says_of_the_study_is_json(study: comparison.Study) -> None:
    comparison.compare(study, Presses("dp-sgd", 1))
    kept = json.loads(Path("study/study.json").read_text())
    assert kept["methods"] == ["dp-sgd", "fo"] and "noise_seed" not in kept
