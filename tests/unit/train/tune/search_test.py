"""A private search: its law, its charge, what it leaves, and what it must not tell."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
import signal
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
from dp_accounting.rdp import RdpAccountant, compute_epsilon
from scipy.stats import chisquare

from tests.support import searches
from tests.support.own_tables import write_table
from tests.support.searches import content, left_in, number_of_trials, search, shape, times_in
from vestige.errors import ConfigError, PrivacyError
from vestige.privacy import accounting, ledger_file
from vestige.privacy.ledger_file import LedgerFile
from vestige.privacy.selection import Law, Selection
from vestige.sampling.streams import Randomness
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.loop import Progress
from vestige.train.tune import search as searching
from vestige.train.tune import trial, writing
from vestige.train.tune.trial import Outcome, Setup


def test_the_claim_is_that_of_the_whole_search_by_the_papers_theorem(tmp_path: Path) -> None:
    """Independent: the curve of dp-accounting for the winner's settings, theorem 2, no more."""
    result = searching.tune(search(out=tmp_path / "a", epsilon=4.0, trials=5, eta=0.5))
    orders = [1 + k / 20 for k in range(1, 400)] + [float(k) for k in range(21, 200)]
    accountant = RdpAccountant(orders)
    one = PoissonSampledDpEvent(40 / 120, GaussianDpEvent(result["noise_multiplier"]))
    accountant.compose(one, 2)
    curve, law = np.array(accountant._rdp), result["search"]
    a, gamma, eta = np.array(orders), law["gamma"], law["eta"]
    mean = eta * (1 - gamma) / (gamma * (1 - gamma**eta))
    aside = ((1 - 1 / a) * curve + math.log(1 / gamma) / a).min()
    whole = curve + (1 + eta) * aside + math.log(mean) / (a - 1)
    expected = float(compute_epsilon(orders, whole, 1e-5)[0])
    assert result["epsilon"] == pytest.approx(expected, rel=5e-3)
    assert 3.99 < result["epsilon"] <= 4.0 and mean == pytest.approx(5)
    assert result["search"]["epsilon_of_one_trial"] < 3
    stated = content(tmp_path / "a", "statement.json")
    assert stated["guarantee"]["epsilon"] == stated["guarantee"]["this_run_alone"]
    assert stated["guarantee"]["epsilon"] == result["epsilon"]
    assert "the best of a private search and charged for all of it" in stated["headline"]
    page = (tmp_path / "a" / "statement.md").read_text()
    assert "the figure contains all of it" in page and "the whole search an epsilon" in page
    assert "Nothing was declared about tuning" not in page
    assert "the claim is that of the whole search" in page
    assert "One charge for the whole search" in page and "(trial of a search)" in page


def check_nothing_but_the_winner(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Three searches: of 1 trial, of 4 whose first one wins, and of 4 whose last one wins.

    The first trials are alike, so the first two searches must leave the same, byte for byte but for
    random names. The last one leaves another winner, of the same shape and with the same notes.
    """
    told: list[list[str]] = []
    for number, best in ((1, 0), (4, 0), (4, 3)):
        out = folder / f"{number}-{best}"
        out.mkdir(parents=True)
        monkeypatch.chdir(out)
        monkeypatch.setenv("TMPDIR", str(out))
        stages: list[Progress] = []
        with monkeypatch.context() as patch:
            number_of_trials(patch, number)
            seen = searches.wins(patch, best)
            searching.tune(search(out=Path("run"), noise_seed=7), stages.append)
            assert len(seen) == number
        printed = capfd.readouterr()
        told.append([str(stages), printed.out, printed.err])
        assert len(times_in(out / "run")) == 1, "times tell"
    assert told[0] == told[1] == told[2], "what is printed tells"
    one, first, last = (left_in(folder / name) for name in ("1-0", "4-0", "4-3"))
    assert one.keys() == first.keys() == last.keys(), "files tell"
    assert [n for n in one if one[n] != first[n]] == [], "contents tell"
    assert one["run/ledger.jsonl"] == last["run/ledger.jsonl"], "the ledger tells"
    for name in one:
        if name.endswith(".json"):
            assert shape(one[name]) == shape(last[name]), "contents tell"
    assert set(one) == {
        *("run/config.json run/ledger.jsonl run/model.json run/model.pt run/result.json".split()),
        *("run/statement.html run/statement.json run/statement.md".split()),
    }


def test_nothing_but_the_winner_is_visible(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    check_nothing_but_the_winner(tmp_path, monkeypatch, capfd)


def _shared_tensors(patch: pytest.MonkeyPatch) -> None:
    """An engine's caveats count the other engines that trained on the same tensors."""
    patch.setattr(trial, "own_tensors", lambda data: data)


def _real_times(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(writing, "settle_times", lambda *_: None)


def _a_loud_trial(patch: pytest.MonkeyPatch) -> None:
    real = trial._outcome

    def outcome(*args: Any) -> Outcome:
        os.write(2, b"a trial\n")
        return real(*args)

    patch.setattr(trial, "_outcome", outcome)


def _a_file_for_each(patch: pytest.MonkeyPatch) -> None:
    real = trial._outcome

    def outcome(*args: Any) -> Any:
        Path(f"trial-{len(list(Path().iterdir()))}").touch()
        return real(*args)

    patch.setattr(trial, "_outcome", outcome)


@pytest.mark.parametrize(
    ("mutant", "caught"),
    [
        (_shared_tensors, "contents tell"),
        (_real_times, "times tell"),
        (_a_loud_trial, "what is printed tells"),
        (_a_file_for_each, "files tell"),
    ],
)
def test_what_would_tell_is_caught(
    mutant: Any,
    caught: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError, match=caught):
        check_nothing_but_the_winner(tmp_path, monkeypatch, capfd)


def check_charged_first(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, spent = trial.run, []

    def run(setup: Setup, *args: Any) -> Any:
        spent.append(ledger_file.read(out / "ledger.jsonl").events)
        assert spent[-1] == (setup.event,)
        return real(setup, *args)

    monkeypatch.setattr(trial, "run", run)
    number_of_trials(monkeypatch, 2)
    searching.tune(search(out=out))
    assert len(spent) == 2
    assert ledger_file.read(out / "ledger.jsonl").events == spent[0]  # once, whatever happened


def test_the_search_is_charged_once_before_its_first_trial(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_charged_first(tmp_path / "a", monkeypatch)


def test_a_charge_after_the_trials_is_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, late = searching.charged, []

    @contextlib.contextmanager
    def after(bills: Any) -> Iterator[None]:
        late.append(bills)
        yield

    monkeypatch.setattr(searching, "charged", after)
    with pytest.raises((AssertionError, ConfigError)):
        check_charged_first(tmp_path / "a", monkeypatch)
    with real(late[0]):
        pass


def test_nobody_else_is_charged_on_the_ledger_while_a_search_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the winner claims is what its ledger holds."""
    real, refused = trial.run, []

    def run(setup: Setup, *args: Any) -> Any:
        with pytest.raises(ConfigError, match="in use") as caught:
            searching.tune(search(out=tmp_path / "a"))
        refused.append(caught.value)
        return real(setup, *args)

    number_of_trials(monkeypatch, 1)
    with monkeypatch.context() as patch:
        patch.setattr(trial, "run", run)
        result = searching.tune(search(out=tmp_path / "a"))
    assert len(refused) == 1
    held = ledger_file.read(tmp_path / "a" / "ledger.jsonl").events
    assert accounting.epsilon(held, 1e-5, "rdp") == result["epsilon"]


def test_a_search_that_is_refused_takes_no_ledger_away(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(trial, "run", lambda *_: None)
        assert searching.tune(search(out=tmp_path / "a"))["interrupted"]
    path = tmp_path / "a" / "ledger.jsonl"
    before, file = path.read_bytes(), LedgerFile(path)
    with pytest.raises(ConfigError, match="in use"):
        searching.tune(search(out=tmp_path / "a"))
    file.close()
    assert path.read_bytes() == before


def check_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """How many trials are run, on which candidates, and who wins a tie."""
    law, runs = Law.with_mean(3, 0), []
    places, winners = Counter[str](), Counter[int]()

    def run(setup: Any, *_: Any) -> Outcome:
        runs[-1] += 1
        places[setup] += 1
        return Outcome(0.5, {}, {}, [], None)

    monkeypatch.setattr(trial, "run", run)
    for seed in range(1500):
        runs.append(0)
        setups: Any = ["a", "b", "c"]
        winner = searching.best_of(law, setups, Randomness(seed), lambda: False)
        assert winner is not None
        winners[winner.place] += 1
    seen = np.append(np.bincount(runs, minlength=6)[1:6], sum(n > 5 for n in runs))
    expected = np.append(law.chances[:5], law.chances[5:].sum())
    assert chisquare(seen, expected / expected.sum() * sum(seen)).pvalue > 1e-4
    for counted in (places, winners):
        assert len(counted) == 3 and chisquare(list(counted.values())).pvalue > 1e-4


def test_trials_are_drawn_by_their_law(monkeypatch: pytest.MonkeyPatch) -> None:
    check_drawn(monkeypatch)


@pytest.mark.parametrize("fixed", ["number", "candidate and ties"])
def test_a_search_without_its_randomness_is_caught(
    fixed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if fixed == "number":
        number_of_trials(monkeypatch, 3)
    else:
        real = Randomness.uniforms

        def uniforms(self: Randomness, purpose: bytes, *address: int) -> Any:
            drawn = real(self, purpose, *address)
            return drawn if purpose == searching.TRIALS else np.full_like(drawn, 0.5)

        monkeypatch.setattr(Randomness, "uniforms", uniforms)
    with pytest.raises(AssertionError):
        check_drawn(monkeypatch)


def test_a_stopped_search_stays_charged_and_the_same_command_begins_a_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    real = trial._outcome

    def outcome(*args: Any) -> Outcome:
        signal.raise_signal(signal.SIGINT)
        return real(*args)

    asked = search(out=tmp_path / "a")
    with monkeypatch.context() as patch:
        number_of_trials(patch, 3)
        patch.setattr(trial, "_outcome", outcome)
        stopped = searching.tune(asked)
    assert capfd.readouterr().err == f"vestige: {searching.ANSWER}\n"
    assert stopped["interrupted"] and set(left_in(tmp_path)) == {"a/ledger.jsonl"}
    assert len(ledger_file.read(tmp_path / "a" / "ledger.jsonl").events) == 1
    number_of_trials(monkeypatch, 1)
    again = searching.tune(search(out=tmp_path / "a"))
    assert again["epsilon"] > stopped["epsilon"] and again["earlier_releases"] == 1
    assert again["search"]["epsilon"] == pytest.approx(stopped["epsilon"])
    with pytest.raises(ConfigError, match="in use"):  # a winner's folder is no place to begin anew
        search(out=tmp_path / "a")


def test_what_follows_on_the_ledger_counts_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number_of_trials(monkeypatch, 1)
    ledger = tmp_path / "common.jsonl"
    run = TrainConfig(**searches.BASE, device="cpu", ledger=ledger)
    before = training.train(run.changed(out=tmp_path / "a"))
    found = searching.tune(search(out=tmp_path / "b", ledger=ledger))
    assert found["epsilon"] > found["search"]["epsilon"] > before["epsilon"]
    after = training.train(run.changed(out=tmp_path / "c"))
    assert after["epsilon"] > found["epsilon"]
    events = ledger_file.read(ledger).events
    assert after["epsilon"] == accounting.epsilon(events, 1e-5, "rdp")
    stated = content(tmp_path / "c", "statement.json")
    assert "selection" in str(stated["ledger"]["earlier"])
    assert "(trial of a search)" in (tmp_path / "c" / "statement.md").read_text()
    with pytest.raises(ConfigError, match="different data"):
        searching.tune(search(out=tmp_path / "d", ledger=ledger, train_size=130))
    assert not (tmp_path / "d").exists()
    with pytest.raises(ConfigError, match="used up by the ledger"):
        searching.tune(search(out=tmp_path / "d", ledger=ledger, epsilon=1.0))


@pytest.mark.parametrize("kind", [RuntimeError, PrivacyError])
def test_a_trial_that_fails_is_the_worst_and_a_search_of_such_ones_has_no_winner(
    kind: type[Exception], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number_of_trials(monkeypatch, 3)
    real, calls = trial._outcome, []

    def outcome(*args: Any) -> Outcome:
        calls.append(1)
        if len(calls) != 2:
            raise kind("what a record said")
        return real(*args)

    monkeypatch.setattr(trial, "_outcome", outcome)
    assert searching.tune(search(out=tmp_path / "a"))["score"]["accuracy"] > 0
    with pytest.raises(ConfigError, match=f"no winner.*{kind.__name__}") as refused:
        searching.tune(search(out=tmp_path / "b"))
    assert "what a record said" not in str(refused.value)
    assert set(left_in(tmp_path / "b")) == {"ledger.jsonl"}


def test_a_trial_beyond_the_common_curve_ends_the_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Setup.session

    def session(self: Setup, noise_seed: int | None = None) -> Any:
        return real(dataclasses.replace(self, config=self.config.changed(lot=60)), noise_seed)

    monkeypatch.setattr(Setup, "session", session)
    with pytest.raises(PrivacyError, match="cost more than was planned"):
        searching.tune(search(out=tmp_path / "a"))
    assert set(left_in(tmp_path / "a")) == {"ledger.jsonl"}


def test_scores_on_own_records_are_noisy_and_charged_as_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_table(tmp_path / "t.csv")
    own = {"dataset": str(path), "train_size": None, "test_size": None, "lot": 8}
    with pytest.raises(ConfigError, match=r"--evaluate-epsilon.*--held-out-is-public"):
        search(**own)
    assert search(**own, public_held_out=True)
    with pytest.raises(ConfigError, match="both given"):
        search(**own, public_held_out=True, evaluate_epsilon=1.0)
    number_of_trials(monkeypatch, 2)
    result = searching.tune(search(**own, out=tmp_path / "a", evaluate_epsilon=2.0, trials=3))
    noisy = result["held_out_release"]
    assert 1.99 < noisy["epsilon"] <= 2.0 and noisy["accuracy"] == result["score"]["accuracy"]
    held_out = ledger_file.read(tmp_path / "a" / "ledger.held-out.jsonl").events
    law = Law(result["search"]["eta"], result["search"]["gamma"])
    assert [event.selection for event in held_out] == [
        Selection(law, (((1.0, noisy["noise_std"], 1),),))
    ]
    assert accounting.epsilon(held_out, 1e-5) == noisy["epsilon"]
    assert not any(result.get(name) for name in ("accuracy", "loss", "metrics"))


def test_in_test_mode_a_search_repeats_and_is_marked(tmp_path: Path) -> None:
    first, second = (
        searching.tune(search(out=tmp_path / name, noise_seed=5, evaluate_epsilon=50.0, trials=2))
        for name in "ab"
    )
    assert first["repeatable_noise"] and first["score"] == second["score"]
    assert left_in(tmp_path / "a")["model.pt"] == left_in(tmp_path / "b")["model.pt"]
    assert content(tmp_path / "a", "statement.json")["status"] == "test mode"
    assert ledger_file.read(tmp_path / "a" / "ledger.jsonl").facts.test_mode
    other = searching.tune(search(out=tmp_path / "c"))
    assert not other["repeatable_noise"]


def test_several_processes_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one process"):
        search()
