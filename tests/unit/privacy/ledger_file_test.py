"""The ledger on disk: ahead of the noise, append-only, and never below what was spent."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.ledgers import charging, crash, end, opened
from vestige import ConfigError, PrivacyError, StorageError
from vestige.privacy import ledger_file
from vestige.privacy.events import counts
from vestige.privacy.ledger import Event, Ledger
from vestige.privacy.ledger_file import LedgerFile, merge_files, read


def test_a_charge_is_on_the_disk_before_it_counts(tmp_path):
    ledger, charge = charging(tmp_path / "l")
    for step in range(1, 12):
        charge(0.1, 1.5)
        assert read(tmp_path / "l").events[0].count >= step
        assert ledger.steps == step


def test_a_full_disk_stops_the_charge_and_leaves_whole_lines(tmp_path, monkeypatch):
    path = tmp_path / "l"
    ledger, charge = charging(path, block=1)
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


def test_a_ledger_that_must_be_there_is_not_made(tmp_path):
    with pytest.raises(ConfigError, match="is not there: put the run's own back"):
        LedgerFile(tmp_path / "l", create=False)
    assert not (tmp_path / "l").exists()


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
