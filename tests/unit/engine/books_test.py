"""Ledgers of engines: shared, kept in files, found again."""

from __future__ import annotations

import time

import pytest
import torch

from tests.support.cut_runs import TRAIN, config
from tests.support.program import plain, run, run_json
from tests.support.small_runs import private
from tests.support.small_runs import run as steps_of
from vestige import ConfigError, PrivacyError
from vestige.privacy.ledger_file import merge_files, read
from vestige.train import training
from vestige.train.run_folder import RunWriter

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_spending_of_others_does_not_stand_in_for_ones_own(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "a"})
    steps_of(*first, steps=5)
    first[0].save_checkpoint(tmp_path / "c")
    first[0].detach()
    other = private("dp-sgd", engine_options={"ledger": tmp_path / "b"})
    steps_of(*other, steps=9)
    other[0].detach()
    resumed = private("dp-sgd", engine_options={"ledger": tmp_path / "b"})
    with pytest.raises(PrivacyError, match="lacks 5 releases"):
        resumed[0].load_checkpoint(tmp_path / "c")
    assert resumed[0].released == 0


def test_a_run_with_a_ledger_file_does_not_go_on_without(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "a"})
    steps_of(*first, steps=2)
    first[0].save_checkpoint(tmp_path / "c")
    with pytest.raises(PrivacyError, match="ledger in a file"):
        private("dp-sgd")[0].load_checkpoint(tmp_path / "c")


def test_engines_that_share_a_ledger_have_names_of_their_own(tmp_path):
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    shared = {"engine_options": {"ledger": first[0].ledger}}
    second = private("dp-sgd", noise_multiplier=2.0, **shared)
    steps_of(*first, steps=3)
    steps_of(*second, steps=5)
    assert (first[0].charged, first[0].earlier) == (3, 5)
    assert (second[0].charged, second[0].earlier) == (5, 3)
    first[0].save_checkpoint(tmp_path / "c")
    first[0].close()
    spent = {r.about["steps"]: r.events for r in read(tmp_path / "l").runs.values()}
    assert len(read(tmp_path / "l").runs) == 2
    assert sum(e.count for e in read(tmp_path / "l").events) == 8, spent
    third = private("dp-sgd", engine_options={"ledger": tmp_path / "l"})
    third[0].load_checkpoint(tmp_path / "c")
    assert (third[0].charged, third[0].earlier, third[0].lost) == (3, 5, 0)


def test_a_ledger_that_was_charged_meanwhile_is_noticed(tmp_path):
    ledger = tmp_path / "l"
    prepared = training.prepare(config(tmp_path / "b", epsilon=3.0, noise_multiplier=None,
                                       ledger=ledger))  # fmt: skip
    training.train(config(tmp_path / "a", ledger=ledger))
    with pytest.raises(ConfigError, match="charged by another run while"):
        RunWriter(prepared).run(lambda _: None)
    assert not (tmp_path / "b").exists()


def test_a_run_is_not_continued_beside_itself(tmp_path):
    """Two engines under one name would give back each other's reserves."""
    first = private("dp-sgd", engine_options={"ledger": tmp_path / "l", "noise_seed": None})
    steps_of(*first, steps=5)
    first[0].save_checkpoint(tmp_path / "c")
    shared = {"engine_options": {"ledger": first[0].ledger, "noise_seed": None}}
    with pytest.raises(PrivacyError, match="going on in another engine"):
        private("dp-sgd", **shared)[0].load_checkpoint(tmp_path / "c")
    second = private("dp-sgd", **shared)
    steps_of(*first, steps=3)
    first[0].detach()
    second[0].load_checkpoint(tmp_path / "c")
    steps_of(*second, steps=10)
    second[0].close()
    assert sum(e.count for e in read(tmp_path / "l").events) == 5 + 3 + 10


def test_what_the_state_knows_of_others_must_be_in_the_file(tmp_path):
    path = tmp_path / "l"
    other = private("dp-sgd", engine_options={"ledger": path}, noise_multiplier=2.0)
    steps_of(*other, steps=4)
    other[0].detach()
    own = private("dp-sgd", engine_options={"ledger": path})
    steps_of(*own, steps=3)
    own[0].save_checkpoint(tmp_path / "c")
    own[0].detach()
    alone = private("dp-sgd", engine_options={"ledger": tmp_path / "alone"})
    steps_of(*alone, steps=1)
    alone[0].detach()
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[: next(i for i, x in enumerate(lines) if b"2.0" in x)]))
    with pytest.raises(PrivacyError, match="lacks"):
        private("dp-sgd", engine_options={"ledger": path})[0].load_checkpoint(tmp_path / "c")


def test_runs_of_two_relations_and_a_seeded_one_on_one_ledger(tmp_path):
    line = f"{TRAIN} --steps 6 --noise-multiplier 5 --ledger l.jsonl"
    first = run_json(line, "--method", "dp-ftrl", "--out", "a")
    second = run_json(line, "--out", "b")
    for result in (first, second):
        assert "zero out one record" in result["adjacency"]
        assert "zero out one record" in result["guarantee"]
        assert "add or remove" not in result["guarantee"]
    assert any("another adjacency" in caveat for caveat in second["caveats"])
    stated = run_json("statement b")
    assert stated["status"] == "private" and "zero out one record" in stated["guarantee"]["kind"]
    shown = run_json("ledger show l.jsonl")
    assert not shown["test_mode"] and "zero out one record" in shown["guarantee"]
    seeded = run_json(line, "--noise-seed", "1", "--out", "c")
    fourth = run_json(line, "--out", "d")
    assert seeded["repeatable_noise"] and not fourth["repeatable_noise"]
    assert any("another run on the ledger was in test mode" in c for c in fourth["caveats"])
    stated = run_json("statement d")
    assert stated["status"] == "test mode" and "an earlier run" in stated["headline"]
    assert "Not for signature" in plain(run("statement d").stdout)
    assert run_json("ledger show l.jsonl")["test_mode"]
    last = plain(run("ledger show l.jsonl").stdout).rpartition("guarantee:")[2]
    assert "test mode" in last
    # A copy of the spending is no cleaner, nor is what is merged from it.
    run_json(f"{TRAIN} --steps 2 --out e")
    assert run_json("ledger merge l.jsonl e --out all.jsonl")["test_mode"]


def test_a_target_that_the_ledger_has_used_up_is_refused_at_once(tmp_path):
    line = "train --model linear --train-size 200 --test-size 20 --lot 20 --epochs 2 --device cpu"
    line += " --epsilon 2 --ledger l.jsonl"
    assert run_json(line, "--out", "a")["epsilon"] <= 2
    started = time.process_time()
    result = run(f"{line} --out b")
    assert time.process_time() - started < 60
    assert result.exit_code == 2
    assert "target_epsilon 2.0 is used up by the ledger: the 20 releases" in plain(result.stderr)
    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("how", ["removed", "replaced"])
def test_a_ledger_file_that_is_taken_away_stops_the_loop(tmp_path, how):
    path = tmp_path / "l"
    made = private("dp-sgd", engine_options={"ledger": path, "noise_seed": None})
    steps_of(*made, steps=3)
    copied = path.read_bytes()
    path.unlink()
    if how == "replaced":
        path.write_bytes(copied)
    with pytest.raises(PrivacyError, match=f"was {how} while a run charges it"):
        steps_of(*made, steps=1)
    assert made[0].released == 3
    # The model can be used elsewhere all the same.
    with pytest.raises(PrivacyError, match=how):
        made[0].detach()
    made[1](made[3].dataset[0][0][None]).sum().backward()
    assert (path.read_bytes() if how == "replaced" else copied) == copied


USERS = {"units": torch.arange(24) // 2, "rows_per_unit": 2}


@pytest.mark.parametrize("first", [{}, USERS])
def test_a_ledger_counts_records_or_users_and_never_both(tmp_path, first):
    other = {} if first else USERS
    for ledger in (tmp_path / "l", None):
        engine, *rest = private("dp-sgd", engine_options={"ledger": ledger}, **first)
        steps_of(engine, *rest, steps=2)
        shared = {"ledger": engine.ledger}
        second, *_ = private("dp-sgd", engine_options=shared, **first)
        assert second.adjacency == engine.adjacency
        with pytest.raises(ConfigError, match="their costs have no sum"):
            private("dp-sgd", engine_options=shared, **other)
        for each in (engine, second):
            each.detach()
    with pytest.raises(ConfigError, match="different data"):
        private("dp-sgd", engine_options={"ledger": tmp_path / "l"}, **other)


def test_engines_that_were_made_before_the_first_release_cannot_mix_either():
    engine, *rest = private("dp-sgd")
    other, *later = private("dp-sgd", engine_options={"ledger": engine.ledger}, **USERS)
    steps_of(engine, *rest, steps=1)
    with pytest.raises(ConfigError, match="their costs have no sum"):
        steps_of(other, *later, steps=1)
    assert engine.ledger.steps == 1


def test_ledgers_of_records_and_of_users_are_not_merged(tmp_path):
    for name, options in (("a", {}), ("b", USERS)):
        engine, *rest = private("dp-sgd", engine_options={"ledger": tmp_path / name}, **options)
        steps_of(engine, *rest, steps=1)
        engine.detach()
    with pytest.raises(ConfigError, match="different data"):
        merge_files([tmp_path / "a", tmp_path / "b"], tmp_path / "both")
