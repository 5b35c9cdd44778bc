"""The ledger on disk: ahead of the noise, append-only, and never below what was spent."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from vestige import ConfigError, PrivacyError, StorageError
from vestige.privacy import ledger_file
from vestige.privacy.ledger import Event, Facts, Ledger
from vestige.privacy.ledger_file import LedgerFile, merge_files, read
from vestige.privacy.ledger_format import Content


def opened(path, block=4, run="one", data="digits", forecast=None):
    """An account on the ledger file at `path`."""
    return LedgerFile(path).account(run, {"data": data}, block, forecast)


def on(path, **options):
    """A ledger with a file, and a function that charges it."""
    account = opened(path, **options)
    ledger = Ledger(account.file)
    return ledger, lambda rate, noise: ledger.charge(rate, noise, account)


def counts(events):
    return {(e.sample_rate, e.noise_multiplier): e.count for e in events}


def end(account):
    account.file.close()


def crash(account):
    """What a killed process leaves: nothing is given back."""
    os.close(account.file._file)
    account.file._closed = True


def test_a_charge_is_on_the_disk_before_it_counts(tmp_path):
    ledger, charge = on(tmp_path / "l")
    for step in range(1, 12):
        charge(0.1, 1.5)
        assert read(tmp_path / "l").events[0].count >= step
        assert ledger.steps == step


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


def test_a_torn_last_line_is_dropped_and_the_next_run_goes_on(tmp_path):
    path = tmp_path / "l"
    file = opened(path, block=1)
    file.cover(Event(0.1, 1.5))
    crash(file)
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind": "reserve", "run": "on')
    again = opened(path, block=1)
    assert counts(again.file.content.events) == {(0.1, 1.5): 1}
    again.cover(Event(0.1, 1.5))
    end(again)
    assert path.read_bytes().startswith(whole)
    assert counts(read(path).events) == {(0.1, 1.5): 2}
    assert read(path).runs["one"].openings == 2


def test_a_changed_removed_or_moved_line_is_found(tmp_path):
    path = tmp_path / "l"
    file = opened(path, block=1)
    for noise in (1.5, 2.5, 3.5):
        file.cover(Event(0.1, noise))
    end(file)
    lines = path.read_bytes().splitlines(keepends=True)
    changed = json.loads(lines[1])
    changed["events"][0][1] = 99.0
    for broken in (
        [lines[0], json.dumps(changed).encode() + b"\n", *lines[2:]],
        [lines[0], *lines[2:]],
        [lines[0], lines[2], lines[1], lines[3]],
        [lines[1], *lines],
        [*lines[:2], b"\n", *lines[2:]],
        [*lines, b"[" * 100_000 + b"\n"],
    ):
        path.write_bytes(b"".join(broken))
        with pytest.raises(ConfigError, match=r"line \d of the ledger .* is damaged"):
            read(path)
        with pytest.raises(ConfigError, match="damaged"):
            LedgerFile(path)


def test_a_full_disk_stops_the_charge_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "l"
    ledger, charge = on(path, block=1)
    charge(0.1, 1.5)
    before = path.read_bytes()
    write = os.write

    def full(file, text):
        write(file, text[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "write", full)
    with pytest.raises(StorageError, match=r"cannot be written \(No space left on device\)"):
        charge(0.1, 1.5)
    assert ledger.steps == 1
    assert path.read_bytes() == before
    monkeypatch.undo()
    charge(0.1, 1.5)
    assert counts(read(path).events) == {(0.1, 1.5): 2}


def test_two_processes_cannot_have_one_ledger(tmp_path):
    file = opened(tmp_path / "l")
    with pytest.raises(ConfigError, match="is in use by another run"):
        LedgerFile(tmp_path / "l")
    end(file)
    LedgerFile(tmp_path / "l").close()
    with pytest.raises(PrivacyError, match="was closed"):
        file.cover(Event(0.1, 1.5))


OTHER_PROCESS = """
import errno, pathlib, sys
from vestige import ConfigError
from vestige.privacy import ledger_file

def no_locks(*_, **__):
    raise OSError(errno.ENOSYS, "Function not implemented")

if sys.argv[2] == "beside":
    ledger_file.lock_descriptor = no_locks
try:
    ledger_file.LedgerFile(pathlib.Path(sys.argv[1])).close()
except ConfigError as error:
    print(error)
"""


def said_by_another_process(path, lock):
    command = [sys.executable, "-c", OTHER_PROCESS, str(path), lock]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def no_locks(*_, **__):
    raise OSError(errno.ENOSYS, "Function not implemented")


@pytest.mark.parametrize("lock", ["on the file", "beside"])
def test_another_process_is_kept_out_under_other_names_too(tmp_path, monkeypatch, lock):
    """Where a system locks no files there is a lock file beside the ledger."""
    path = tmp_path / "l"
    names = [path, tmp_path / "soft link"]
    names[1].symlink_to(path)
    if lock == "beside":
        monkeypatch.setattr(ledger_file, "lock_descriptor", no_locks)
    account = opened(path, block=1)
    if lock == "on the file":
        names.append(tmp_path / "hard link")
        os.link(path, names[2])
    for name in names:
        assert "is in use by another run" in said_by_another_process(name, lock)
        with pytest.raises(ConfigError, match="is in use by another run"):
            LedgerFile(name)
    account.cover(Event(0.1, 1.5))
    end(account)
    assert said_by_another_process(path, lock) == ""
    assert counts(read(path).events) == {(0.1, 1.5): 1}


def test_a_ledger_that_cannot_be_there_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="is not there"):
        LedgerFile(tmp_path / "none" / "l")
    with pytest.raises(ConfigError, match="cannot be read"):
        read(tmp_path / "none")
    (tmp_path / "text").write_text("hello\n")
    with pytest.raises(ConfigError, match="line 1"):
        read(tmp_path / "text")


def test_runs_on_one_ledger_compose(tmp_path):
    path = tmp_path / "l"
    for run, noise in (("one", 1.5), ("two", 1.5), ("two", 2.5)):
        file = opened(path, run=run)
        file.cover(Event(0.1, noise))
        end(file)
    ledger = Ledger(LedgerFile(path))
    assert counts(ledger.merged()) == {(0.1, 1.5): 2, (0.1, 2.5): 1}
    assert counts(ledger.file.content.runs["two"].events) == {(0.1, 1.5): 1, (0.1, 2.5): 1}
    with pytest.raises(PrivacyError, match="by a run that is on it"):
        ledger.charge(0.1, 1.5)
    ledger.file.close()


def test_merging_adds_runs_up_and_counts_what_copies_share_once(tmp_path):
    first = tmp_path / "a"
    file = opened(first, block=1)
    for _ in range(3):
        file.cover(Event(0.1, 1.5))
    crash(file)
    copy = tmp_path / "copy"
    copy.write_bytes(first.read_bytes())
    for path, more in ((first, 2), (copy, 5)):
        file = opened(path, block=1)
        for _ in range(more):
            file.cover(Event(0.1, 1.5))
        end(file)
    other = opened(tmp_path / "b", run="two", block=1)
    other.cover(Event(0.2, 1.0))
    end(other)
    merged = merge_files([first, copy, tmp_path / "b"], tmp_path / "all")
    assert counts(merged.events) == {(0.1, 1.5): 3 + 2 + 5, (0.2, 1.0): 1}
    assert read(tmp_path / "all").events == merged.events
    # Merging what was merged, or the same file twice, changes nothing.
    again = merge_files([first, first], tmp_path / "same")
    assert counts(again.events) == {(0.1, 1.5): 5}


def test_merging_an_open_block_and_its_settled_copy_keeps_the_larger(tmp_path):
    path, copy = tmp_path / "a", tmp_path / "copy"
    file = opened(path, block=8)
    file.forecast = lambda n: [Event(0.1, 1.5, n)]
    file.cover(Event(0.1, 1.5))
    copy.write_bytes(path.read_bytes())  # all eight are charged here
    end(file)  # and one here
    assert counts(merge_files([path, copy], tmp_path / "all").events) == {(0.1, 1.5): 8}


def test_merging_refuses_other_data_and_never_overwrites(tmp_path):
    for name, data in (("a", "digits"), ("b", "mnist")):
        file = opened(tmp_path / name, run=name, data=data)
        file.cover(Event(0.1, 1.5))
        end(file)
    with pytest.raises(ConfigError, match=r'different data.*"digits"; "mnist"'):
        merge_files([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert not (tmp_path / "all").exists()
    with pytest.raises(ConfigError, match="never overwritten"):
        merge_files([tmp_path / "a", tmp_path / "a"], tmp_path / "b")
    with pytest.raises(ConfigError, match="at least two"):
        merge_files([tmp_path / "a"], tmp_path / "all")


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


def test_a_ledger_that_must_be_there_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="is not there: put the run's own back"):
        LedgerFile(tmp_path / "l", create=False)
    assert not (tmp_path / "l").exists()


NO_LEDGERS = {
    "config": b'{"lr": 0.1}',
    "key": b"-----a key without a newline-----",
    "text": b"line one\nline two",
    "bytes": bytes(range(11, 256)) * 9,
    "zeros": b"\0" * 64,
    "braces": b"{}",
    "bracket": b"[",
    "other kind": b'{"kind": "note", "version": 1}',
    "other version": b'{"kind": "open", "version": 7, "run": "a',
    "later line": b'{"kind": "reserve", "run": "one", "ev',
    "newline": b"\n",
}


@pytest.mark.parametrize("name", NO_LEDGERS)
def test_what_is_no_ledger_is_refused_and_left_as_it_is(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(NO_LEDGERS[name])
    for act in (read, LedgerFile, lambda p: merge_files([p, p], tmp_path / "all")):
        with pytest.raises(ConfigError, match="line 1 of"):
            act(path)
        assert path.read_bytes() == NO_LEDGERS[name]
    assert not (tmp_path / "all").exists()


@pytest.mark.parametrize("tail", [b"a note", b'{"a": 1}', b"[", b'{"kind": "x", ', b'"', b"\0{"])
def test_a_tail_that_nobody_here_has_written_is_not_cut_off(tmp_path, tail):
    path = tmp_path / "l"
    file = opened(path)
    file.cover(Event(0.1, 1.5))
    end(file)
    whole = path.read_bytes()
    path.write_bytes(whole + tail)
    for act in (read, LedgerFile):
        with pytest.raises(ConfigError, match="damaged"):
            act(path)
    assert path.read_bytes() == whole + tail


@pytest.mark.parametrize("kept", [1, 5, 14, 30, 60])
def test_a_torn_first_line_and_zeros_after_a_crash_are_dropped(tmp_path, kept):
    path = tmp_path / "l"
    file = opened(path)
    file.cover(Event(0.1, 1.5))
    end(file)
    whole = path.read_bytes()
    path.write_bytes(whole[:kept])
    LedgerFile(path).close()
    assert path.read_bytes() == b""
    for torn in (b"\0" * kept, *(whole[:n] for n in range(kept))):
        path.write_bytes(whole + torn)
        LedgerFile(path).close()
        assert path.read_bytes() == whole


def test_a_whole_last_line_that_was_changed_is_damage_and_not_a_torn_write(tmp_path):
    path = tmp_path / "l"
    file = opened(path, block=1)
    file.cover(Event(0.1, 1.5))
    end(file)
    path.write_bytes(path.read_bytes().rstrip(b"\n").replace(b"1.5", b"9.5"))
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"line 2 of the ledger .* is damaged"):
        LedgerFile(path)
    assert path.read_bytes() == before


def test_only_ordinary_files_are_ledgers(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "null").symlink_to("/dev/null")
    (tmp_path / "to pipe").symlink_to(tmp_path / "pipe")
    for path in ("/dev/null", "/dev/zero", *(tmp_path / n for n in ("pipe", "null", "to pipe"))):
        for act in (lambda p: read(Path(p)), LedgerFile):
            with pytest.raises(ConfigError, match="is a device, a pipe or a socket, not a file"):
                act(path)
    for act in (read, LedgerFile):
        with pytest.raises(ConfigError, match="is a folder, not a file"):
            act(tmp_path / "folder")
    # A link to a ledger is one.
    (tmp_path / "link").symlink_to(tmp_path / "l")
    file = opened(tmp_path / "link")
    file.cover(Event(0.1, 1.5))
    end(file)
    assert counts(read(tmp_path / "l").events) == {(0.1, 1.5): 1}


def remove(path):
    path.unlink()


def replace_by_a_copy(path):
    (path.parent / "copy").write_bytes(path.read_bytes())
    (path.parent / "copy").replace(path)


def move_away(path):
    path.rename(path.parent / "elsewhere")


def empty(path):
    os.truncate(path, 0)


def add_a_line(path):
    with path.open("ab") as file:
        file.write(b'{"kind": "digest"}\n')


def change_in_place(path):
    path.write_bytes(path.read_bytes().replace(b"1.5", b"9.5"))


@pytest.mark.parametrize("act", [remove, replace_by_a_copy, move_away, empty, add_a_line,
                                 change_in_place])  # fmt: skip
@pytest.mark.parametrize("left", [0, 5])
def test_a_file_that_is_taken_away_under_a_run_stops_it_at_the_next_charge(tmp_path, act, left):
    """Also where the reserve would last for longer."""
    path = tmp_path / "l"
    file = opened(path, block=3 + left, forecast=lambda n: [Event(0.1, 1.5, n)])
    for _ in range(3):
        file.cover(Event(0.1, 1.5))
    act(path)
    after = path.read_bytes() if path.exists() else None
    for _ in range(2):
        with pytest.raises((PrivacyError, ConfigError), match=r"removed|replaced|changed"):
            file.cover(Event(0.1, 1.5))
    with pytest.raises((PrivacyError, ConfigError), match=r"removed|replaced|changed"):
        end(file)
    assert (path.read_bytes() if path.exists() else None) == after


def test_a_file_that_was_only_touched_goes_on(tmp_path):
    file = opened(tmp_path / "l", block=1)
    file.cover(Event(0.1, 1.5))
    os.utime(tmp_path / "l", (0, 0))
    file.cover(Event(0.1, 1.5))
    end(file)
    assert counts(read(tmp_path / "l").events) == {(0.1, 1.5): 2}


def test_a_run_is_as_private_as_the_least_private_of_its_sessions(tmp_path):
    path = tmp_path / "l"
    for test_mode in (False, True, False):
        account = LedgerFile(path).account("one", {"data": 1, "test_mode": test_mode})
        account.cover(Event(0.1, 1.5))
        end(account)
    assert read(path).facts.test_mode
    account = LedgerFile(tmp_path / "noted").account("two", {"data": 1, "adjacency": "zero out x"})
    account.cover(Event(0.1, 1.5))
    account.note("release 0 of two", "abc")  # as files of earlier versions tell of test mode
    end(account)
    assert read(tmp_path / "noted").facts == Facts("zero out x", True)
    merged = merge_files([path, tmp_path / "noted"], tmp_path / "all")
    assert merged.facts == read(tmp_path / "all").facts == Facts("zero out x", True)
