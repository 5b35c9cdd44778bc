"""The lines of a ledger file: whole ones count, torn ones are dropped, changed ones are found."""

from __future__ import annotations

import json

import pytest

from tests.support.ledgers import crash, end, opened
from vestige import ConfigError
from vestige.privacy.events import counts
from vestige.privacy.ledger import Event, Facts
from vestige.privacy.ledger_file import LedgerFile, merge_files, read


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
