"""What a run reserves on a ledger file: ahead of the noise, and given back only if unused."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from tests.support.ledgers import crash, end, opened
from vestige import PrivacyError
from vestige.privacy.events import counts
from vestige.privacy.ledger import Event
from vestige.privacy.ledger_file import LedgerFile, read
from vestige.privacy.ledger_format import Content


def test_every_reserve_is_synced_before_the_charge_returns(tmp_path, monkeypatch):
    order = []
    fsync, write = os.fsync, os.write
    monkeypatch.setattr(os, "write", lambda f, t: (order.append("write"), write(f, t))[1])
    monkeypatch.setattr(os, "fsync", lambda f: (order.append("sync"), fsync(f))[1])
    file = opened(tmp_path / "l")
    order.clear()
    file.forecast = lambda n: [Event(0.1, 1.5, n)]
    for _ in range(4):
        file.cover(Event(0.1, 1.5))
        order.append("noise")
    assert order == ["write", "sync", "noise", "noise", "noise", "noise"]


def test_a_clean_end_gives_back_and_a_crash_does_not(tmp_path):
    for ending, charged in ((end, 5), (crash, 8)):
        path = tmp_path / ending.__name__
        file = opened(path)
        file.forecast = lambda n: [Event(0.1, 1.5, n)]
        for _ in range(5):
            file.cover(Event(0.1, 1.5))
        ending(file)
        assert counts(read(path).events) == {(0.1, 1.5): charged}


def test_without_a_forecast_blocks_grow_and_rare_events_stay_alone(tmp_path):
    file = opened(tmp_path / "l", block=64)
    for _ in range(3):
        file.cover(Event(1.0, 9.0))
        for _ in range(20):
            file.cover(Event(0.1, 1.5))
    crash(file)
    found = counts(read(tmp_path / "l").events)
    assert found[1.0, 9.0] == 3
    assert 60 <= found[0.1, 1.5] <= 60 + 16


def test_what_is_left_of_a_block_is_given_back_when_another_event_comes(tmp_path):
    file = opened(tmp_path / "l", block=10)
    file.forecast = lambda n: [Event(0.1, 1.5, n)]
    file.cover(Event(0.1, 1.5))
    file.cover(Event(0.2, 1.5))
    file.cover(Event(0.1, 1.5))
    end(file)
    assert counts(read(tmp_path / "l").events) == {(0.1, 1.5): 2, (0.2, 1.5): 1}


@pytest.mark.parametrize("seed", range(6))
def test_whenever_the_file_is_cut_it_covers_what_was_drawn(tmp_path, seed):
    """Any prefix of the file that held at a charge covers the charges until then."""
    import random

    chance = random.Random(seed)
    path = tmp_path / "l"
    file = opened(path, block=chance.choice([1, 3, 8]))
    if seed % 2:
        file.forecast = lambda n: [Event(0.1, 1.5, n)]
    drawn = Counter()
    for _ in range(40):
        event = chance.choice([Event(0.1, 1.5), Event(0.1, 1.5), Event(0.3, 2.0)])
        if chance.random() < 0.1:
            file.settle()
        file.cover(event)
        drawn[event.sample_rate, event.noise_multiplier] += 1
        # A crash here, or in the middle of whatever is written next.
        (tmp_path / "copy").write_bytes(path.read_bytes() + b'{"kind": "res')
        assert Counter(counts(read(tmp_path / "copy").events)) >= drawn
    end(file)
    assert Counter(counts(read(path).events)) == drawn


def test_digests_are_kept_and_found_again(tmp_path):
    file = opened(tmp_path / "l")
    file.note("release 0 of one", "abc")
    crash(file)
    again = opened(tmp_path / "l")
    assert again.digest("release 0 of one") == "abc"
    assert again.digest("release 1 of one") is None
    end(again)


def test_infinite_noise_survives_the_file(tmp_path):
    file = opened(tmp_path / "l")
    file.cover(Event(0.1, float("inf")))
    end(file)
    assert counts(read(tmp_path / "l").events) == {(0.1, float("inf")): 1}


@pytest.mark.parametrize("doing", ["reserve", "settle"])
@pytest.mark.parametrize("when", ["before", "half", "after"])
def test_ctrl_c_in_a_write_neither_damages_nor_forgets(tmp_path, monkeypatch, doing, when):
    path = tmp_path / "l"
    account = opened(path, block=10, forecast=lambda n: [Event(0.1, 1.5, n)])
    drawn = 0
    for _ in range(3 if doing == "settle" else 10):
        account.cover(Event(0.1, 1.5))
        drawn += 1
    write, fsync = os.write, os.fsync

    def torn(file, content):
        if when == "half":
            write(file, bytes(content)[:20])
        if when != "after":
            raise KeyboardInterrupt
        return write(file, content)

    def late(file):
        fsync(file)
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "write", torn)
    if when == "after":
        monkeypatch.setattr(os, "fsync", late)
    with pytest.raises(KeyboardInterrupt):
        account.settle() if doing == "settle" else account.cover(Event(0.1, 1.5))
    monkeypatch.undo()
    for _ in range(15):
        account.cover(Event(0.1, 1.5))
        drawn += 1
        assert counts(read(path).events)[0.1, 1.5] >= drawn
    end(account)
    assert counts(read(path).events)[0.1, 1.5] >= drawn
    assert counts(opened(path).file.content.events)[0.1, 1.5] >= drawn


def test_an_interrupt_between_the_write_and_the_memory_of_it(tmp_path, monkeypatch):
    path = tmp_path / "l"
    account = opened(path, block=10, forecast=lambda n: [Event(0.1, 1.5, n)])
    for _ in range(3):
        account.cover(Event(0.1, 1.5))

    def stopped(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Content, "take", stopped)
    with pytest.raises(KeyboardInterrupt):
        account.settle()
    monkeypatch.undo()
    for _ in range(5):
        account.cover(Event(0.1, 1.5))
    end(account)
    assert counts(read(path).events) == {(0.1, 1.5): 8}


def test_a_forked_process_cannot_give_back_what_its_parent_reserved(tmp_path):
    account = opened(tmp_path / "l", block=10, forecast=lambda n: [Event(0.1, 1.5, n)])
    account.cover(Event(0.1, 1.5))
    before = (tmp_path / "l").read_bytes()
    child = os.fork()
    if child == 0:
        refused = 0
        for act in (account.settle, lambda: account.cover(Event(0.1, 1.5))):
            try:
                act()
            except PrivacyError:
                refused += 1
        account.file.close()
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2
    assert (tmp_path / "l").read_bytes() == before


def test_two_runs_of_one_process_have_accounts_of_their_own(tmp_path):
    file = LedgerFile(tmp_path / "l")
    one, two = file.account("one", block=4), file.account("two", block=4)
    for _ in range(3):
        one.cover(Event(0.1, 1.5))
        two.cover(Event(0.2, 1.5))
    one.settle()
    two.cover(Event(0.2, 1.5))
    file.close()
    runs = read(tmp_path / "l").runs
    assert counts(runs["one"].events) == {(0.1, 1.5): 3}
    assert counts(runs["two"].events) == {(0.2, 1.5): 4}
