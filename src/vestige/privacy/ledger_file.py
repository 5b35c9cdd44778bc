"""The ledger on disk: what was spent is durable before the noise that it pays for is drawn.

A file of JSON lines (ledger_format.py) that is only ever appended to. A run reserves the cost of a
block of coming releases, waits until the line is on the disk, and then charges against it without
touching the disk again. What of a block was not used is given back when the run saves a checkpoint
or ends; a run that is killed gives nothing back, so a crash charges the whole open block.

Guarantee: the events read from the file are at least those whose noise was drawn, whenever the
process or the machine died, as long as the disk keeps what it has confirmed. A file that is
removed, replaced or changed under a run stops it at the next charge. Nothing protects against
somebody who does so between two runs; a checkpoint that knows of more spending than the file is
refused (`Ledger.load_state_dict`).
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from filelock import FileLock, Timeout, lock_descriptor, unlock_descriptor

from vestige.errors import ConfigError, PrivacyError, StorageError, VestigeError
from vestige.files import sync_folder, write_all
from vestige.privacy.account import Account, Forecast
from vestige.privacy.events import counts, from_counts
from vestige.privacy.ledger import together
from vestige.privacy.ledger_format import (
    Content,
    RunRecord,
    chain,
    check_kind,
    parse,
    read,
    written,
)

if TYPE_CHECKING:
    from vestige.privacy.ledger import Ledger

__all__ = ["Account", "LedgerFile", "common_data", "merge_files", "opened_here", "read"]
_OPEN: list[LedgerFile] = []  # those that this process has


def opened_here(path: Path) -> LedgerFile | None:
    """The ledger file at `path`, if this process has it open already."""
    with contextlib.suppress(OSError):
        there = path.stat()
        return next((file for file in _OPEN if file.is_at(there)), None)
    return None


class LedgerFile:
    """A ledger file that this process has: locked, appended to, and never taken back.

    Whatever interrupts a write, the file stays whole lines, and what this object believes is read
    again from the disk before it is used. `ledger` is the one that has this file behind it.
    """

    def __init__(self, path: str | Path, create: bool = True) -> None:
        self.path = Path(path).absolute()
        self._process, self._closed, self._doubtful = os.getpid(), False, False
        self._accounts: list[Account] = []
        self.ledger: Ledger | None = None
        self._seen = (0, 0)
        self._file = _open(self.path, create)
        self._lock: FileLock | None = None
        try:
            check_kind(self.path, os.fstat(self._file))
            self._lock = _lock(self._file, self.path)
            self._read()
        except BaseException:
            self._let_go()
            raise
        atexit.register(self._close_at_exit)
        _OPEN.append(self)

    @property
    def closed(self) -> bool:
        """Whether it was given back."""
        return self._closed

    def is_at(self, there: os.stat_result) -> bool:
        """Whether this process has the file that `there` tells of."""
        ours = self._process == os.getpid() and not self._closed
        return ours and os.path.samestat(there, os.fstat(self._file))

    def has_open(self, run: str, but: Account) -> bool:
        """Whether another engine of this process is that run."""
        return any(one.run == run and one is not but for one in self._accounts)

    def leave(self, account: Account) -> None:
        """The engine of that account has ended."""
        account.settle()
        self._accounts.remove(account)

    def account(
        self,
        run: str,
        about: Mapping[str, Any] | None = None,
        block: int = 16,
        forecast: Forecast | None = None,
        session: str | None = None,
    ) -> Account:
        """The account of one run on this file; `session` names the engine."""
        account = Account(self, run, dict(about or {}), block, forecast, session)
        self._accounts.append(account)
        return account

    def close(self) -> None:
        """Give back what no run has used and let others have the file."""
        if self._closed or os.getpid() != self._process:
            return
        try:
            for account in self._accounts:
                account.settle()
        finally:
            self._closed = True
            self._accounts.clear()  # they hold the runs, and with them the models
            self._let_go()
            _OPEN.remove(self)
            atexit.unregister(self._close_at_exit)

    def _close_at_exit(self) -> None:
        try:
            self.close()
        except VestigeError as error:
            print(f"vestige: warning: {error}", file=sys.stderr)  # nobody is there to catch it

    def check(self) -> None:
        """Refuse a file that was closed, belongs to another process, or is not at its path."""
        if os.getpid() != self._process:
            raise PrivacyError(
                f"this process was forked from one that has the ledger {str(self.path)!r}: two "
                "processes would overwrite each other's charges. Make an engine of its own."
            )
        if self._closed:
            raise PrivacyError(
                f"the ledger {str(self.path)!r} was closed: make a new PrivacyEngine(ledger=...) "
                "on it for a new run."
            )
        try:
            there = self.path.stat()
        except OSError:
            raise self._gone("removed") from None
        if not self.is_at(there):  # nobody will find what is written to this one
            raise self._gone("replaced")
        if self._doubtful:
            # A write was interrupted: what is on the disk counts, and all of every open block.
            self._read()
            for account in self._accounts:
                account.forget()
            self._doubtful = False
        elif self._seen != self._stamp():
            # Somebody else has touched it: the same lines must still be there.
            now = parse(self._bytes(), self.path)
            same = (now.last, now.length) == (self.content.last, self.content.length)
            if not same or now.open_end:
                raise self._gone("changed")
            self._seen = self._stamp()

    def _gone(self, how: str) -> PrivacyError:
        return PrivacyError(
            f"the ledger {str(self.path)!r} was {how} while a run charges it: nothing more is "
            "released. Put the run's own file back and go on from a checkpoint; without it, treat "
            "the data as spent."
        )

    def append(self, lines: Sequence[Mapping[str, Any]], durable: bool = True) -> str:
        """Add lines, on the disk when this returns, or none of them; the hash of the last."""
        self.check()
        content, text, last = self.content, b"", self.content.last
        for line in lines:
            more, last = written(last, line)
            text += more
        self._doubtful = True
        try:
            write_all(self._file, text)
            if durable:
                os.fsync(self._file)
        except BaseException as error:
            # A half line must not stand in the way of the next.
            self._cut(content.length)
            if isinstance(error, OSError):
                raise StorageError(
                    f"the ledger {str(self.path)!r} cannot be written ({error.strerror}): the lot "
                    "was not released. Make room, or make the folder writable, and resume the run."
                ) from error
            raise
        for line in lines:
            content.take(line)
        content.length += len(text)
        self._seen, self._doubtful = self._stamp(), False
        return content.last

    def _stamp(self) -> tuple[int, int]:
        """What changes when somebody else writes to the file."""
        now = os.fstat(self._file)
        return now.st_size, now.st_mtime_ns

    def _bytes(self) -> bytes:
        """What the file holds, also where its name is another's by now."""
        with open(self._file, "rb", closefd=False) as file:
            file.seek(0)
            return file.read()

    def _read(self) -> None:
        """Take what is on the disk, and cut off the beginning of a line that never was durable."""
        content = parse(self._bytes(), self.path)
        if content.length < os.fstat(self._file).st_size:
            self._cut(content.length)
        if content.open_end:
            write_all(self._file, b"\n")
            content.length, content.open_end = content.length + 1, False
        self.content, self._seen = content, self._stamp()

    def _cut(self, length: int) -> None:
        os.ftruncate(self._file, length)
        with contextlib.suppress(OSError):
            os.fsync(self._file)

    def _let_go(self) -> None:
        with contextlib.suppress(OSError):
            if self._lock:
                self._lock.release()
            else:
                unlock_descriptor(self._file)  # a forked worker would keep it otherwise
        os.close(self._file)


def merge_files(paths: Sequence[Path], out: Path) -> Content:
    """Compose ledgers about the same data into a new ledger file.

    A run that is in several of them (a run folder that was copied and continued) is charged once
    for what the copies share and for everything that any of them did after. Returns what was
    written; the sources stay.
    """
    if len(paths) < 2:
        raise ConfigError("merge needs at least two ledgers: give their paths.")
    if os.path.lexists(out):
        raise ConfigError(f"{str(out)!r} exists: a ledger is never overwritten; give a new path.")
    merged: dict[str, RunRecord] = {}
    for path in paths:
        for run in read(path).runs.values():
            whole = merged.setdefault(run.run, RunRecord(run.run, dict(run.about)))
            whole.add_session(run.about)
            whole.noted |= run.noted
            for line, block in run.blocks.items():
                # The same reserve in two copies: each kind as often as in the copy with more.
                largest = counts(whole.blocks.get(line, ())) | counts(block)
                whole.blocks[line] = from_counts(largest)
    facts = together(run.facts for run in merged.values())
    about = {
        "data": common_data(run.about for run in merged.values()),
        "merged": sorted(merged),
        "adjacency": facts.adjacency,
        "test_mode": facts.test_mode,
    }
    file = LedgerFile(out)
    account = file.account(chain("", {"merged": sorted(merged)})[:16], about)
    charged = counts(event for run in merged.values() for event in run.events)
    file.append([account.opening(), account.reserving(charged)])
    file.close()
    return file.content


def common_data(abouts: Iterable[Mapping[str, Any]]) -> Any:
    """The data that all these runs are about; ConfigError where it is not the same."""
    kinds: list[Any] = []
    for about in abouts:
        if about.get("data") not in kinds:
            kinds.append(about.get("data"))
    if len(kinds) > 1:
        raise ConfigError(
            "the ledgers are about different data, whose spending does not add up: "
            + "; ".join(json.dumps(data) for data in kinds)
        )
    return kinds[0] if kinds else None


def _open(path: Path, create: bool) -> int:
    """A descriptor of the file, to read and to append; a new one has its name on the disk."""
    try:
        new = not path.exists()
        if not new:
            check_kind(path, path.stat())  # before it is opened: a device may do something
        flags = os.O_RDWR | os.O_APPEND | (os.O_CREAT if create else 0)
        flags |= getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)  # Unix, Windows
        file = os.open(path, flags, 0o644)
    except FileNotFoundError as error:
        raise ConfigError(
            f"the ledger {str(path)!r} is not there: "
            + ("give a path in a folder that exists." if create else "put the run's own back.")
        ) from error
    except OSError as error:
        raise ConfigError(
            f"the ledger {str(path)!r} cannot be opened ({error.strerror}): give a path in a "
            "folder that can be written."
        ) from error
    if new:
        sync_folder(path.parent)
    return file


def _lock(file: int, path: Path) -> FileLock | None:
    """Keep other runs out of the file; ConfigError where one has it.

    The file itself is locked, so that it is locked under every name that it has. Windows would let
    nobody read it then, and some systems lock no files: there it is a lock file beside it.
    """
    try:
        if os.name != "nt":
            if not lock_descriptor(file, blocking=False):
                raise Timeout(str(path))
            return None
    except OSError as error:
        if error.errno != errno.ENOSYS:
            raise _in_use(path) from None
    real = path.resolve()
    lock = FileLock(real.with_name(f".{real.name}.lock"), timeout=0, thread_local=False)
    try:
        lock.acquire()
    except (OSError, RuntimeError):
        raise _in_use(path) from None
    return lock


def _in_use(path: Path) -> ConfigError:
    return ConfigError(
        f"the ledger {str(path)!r} is in use by another run: wait until it ends. In one process, "
        "share it: PrivacyEngine(ledger=other_engine.ledger)."
    )
