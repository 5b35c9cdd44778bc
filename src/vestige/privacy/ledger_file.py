"""The ledger on disk: what was spent is durable before the noise that it pays for is drawn.

A file of JSON lines that is only ever appended to. A run reserves the cost of a block of coming
releases, waits until the line is on the disk, and then charges against it without touching the
disk again. What of a block was not used is given back when the run saves a checkpoint or ends; a
run that is killed gives nothing back, so a crash charges the whole open block.

    open      a run begins, or goes on after a resume
    reserve   these events are charged from now on
    spent     of that reserve, only these were used
    digest    test mode: the hash of something released, so that a replay can be compared

Every line carries the hash of all lines before it, so a line that was changed, removed or moved is
found. A last line without its end was never durable, paid for nothing, and is dropped; a file that
does not begin as a ledger is refused and left as it is.

Guarantee: the events read from the file are at least those whose noise was drawn, whenever the
process or the machine died, as long as the disk keeps what it has confirmed. A file that is
removed, replaced or changed under a run stops it at the next charge. Nothing protects against
somebody who does so between two runs; a checkpoint that knows of more spending than the file is
refused (`Ledger.load_state_dict`).
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import hashlib
import json
import math
import os
import secrets
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vestige.errors import ConfigError, PrivacyError, StorageError, VestigeError
from vestige.files import sync_folder, write_all
from vestige.plan import ADJACENCY
from vestige.privacy.ledger import Event, Facts, merge, together

if TYPE_CHECKING:
    from vestige.privacy.ledger import Ledger

_VERSION = 1
_FIELDS = {
    "open": {"version", "run", "session", "about"},
    "reserve": {"run", "events"},
    "spent": {"run", "block", "events"},
    "digest": {"run", "of", "hash"},
}
Forecast = Callable[[int], Sequence[Event]]
# How every line begins that `LedgerFile.append` writes, and the first one in particular.
_BEGINNINGS = tuple(f'{{"kind": "{kind}", '.encode() for kind in _FIELDS)
_FIRST = _BEGINNINGS[0] + f'"version": {_VERSION}, "run": "'.encode()


@dataclass
class Spending:
    """What one run has on a ledger: its public facts and its events."""

    run: str
    about: dict[str, Any] = field(default_factory=dict)
    blocks: dict[str, tuple[Event, ...]] = field(default_factory=dict)  # by the hash of the line
    openings: int = 0
    noted: bool = False  # whether digests of releases were noted, as in test mode

    @property
    def facts(self) -> Facts:
        """What a claim that contains this run has to say."""
        adjacency = str(self.about.get("adjacency", ADJACENCY))
        return Facts(adjacency, self.noted or bool(self.about.get("test_mode")))

    @property
    def events(self) -> tuple[Event, ...]:
        """All events of the run, merged."""
        return merge(event for block in self.blocks.values() for event in block)


@dataclass
class Content:
    """What a ledger file says."""

    runs: dict[str, Spending] = field(default_factory=dict)
    digests: dict[str, str] = field(default_factory=dict)  # of releases in test mode, by name
    sessions: set[str] = field(default_factory=set)  # which engines have charged it
    last: str = ""  # the hash of the last whole line
    length: int = 0  # bytes up to the end of the last whole line
    open_end: bool = False  # whether that line lacks its end

    @property
    def events(self) -> tuple[Event, ...]:
        """The events of all runs, merged: they compose."""
        return merge(event for run in self.runs.values() for event in run.events)

    @property
    def facts(self) -> Facts:
        """What holds for all runs with a charge."""
        return together(run.facts for run in self.runs.values() if run.events)


def read(path: Path) -> Content:
    """What a ledger file says; ConfigError for one that is damaged or is no ledger."""
    try:
        _check_kind(path, path.stat())
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the ledger {str(path)!r} cannot be read ({error.strerror}): give the ledger.jsonl "
            "of a run."
        ) from error
    return _parse(data, path)


_OPEN: list[LedgerFile] = []  # those that this process has


def opened_here(path: Path) -> LedgerFile | None:
    """The ledger file at `path`, if this process has it open already."""
    with contextlib.suppress(OSError):
        there = path.stat()
        for file in _OPEN:
            if file.is_at(there):
                return file
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
        self._file = _open_locked(self.path, create)
        try:
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
        """Refuse to go on with a file that was closed or belongs to another process."""
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
        self._check_place()
        if self._doubtful:
            # A write was interrupted: what is on the disk counts, and all of every open block.
            self._read()
            for account in self._accounts:
                account.forget()
            self._doubtful = False
        elif self._seen != self._stamp():
            # Somebody else has touched it: the same lines must still be there.
            known = self.content.last, self.content.length
            now = _parse(self._bytes(), self.path)
            if (now.last, now.length) != known or now.open_end:
                raise self._gone("changed")
            self._seen = self._stamp()

    def _check_place(self) -> None:
        """Refuse to charge a file that nobody will find at its path any more."""
        try:
            there = self.path.stat()
        except OSError:
            raise self._gone("removed") from None
        if not self.is_at(there):
            raise self._gone("replaced")

    def _gone(self, how: str) -> PrivacyError:
        return PrivacyError(
            f"the ledger {str(self.path)!r} was {how} while a run charges it: nothing more is "
            "released. Put the run's own file back and go on from a checkpoint; without it, treat "
            "the data as spent."
        )

    def append(self, lines: Sequence[Mapping[str, Any]], durable: bool = True) -> str:
        """Add lines, on the disk when this returns, or none of them; the hash of the last."""
        self.check()
        content, text = self.content, b""
        last = content.last
        for line in lines:
            last = _chain(last, line)
            text += json.dumps({**line, "chain": last}, allow_nan=False).encode() + b"\n"
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
            content.last = _chain(content.last, line)
            _take(content, line, content.last)
        content.length += len(text)
        self._seen, self._doubtful = self._stamp(), False
        return content.last

    def _stamp(self) -> tuple[int, int]:
        """What changes when somebody else writes to the file."""
        now = os.fstat(self._file)
        return now.st_size, now.st_mtime_ns

    def _bytes(self) -> bytes:
        """What the file holds, also where its name is another's by now."""
        return os.pread(self._file, os.fstat(self._file).st_size, 0)

    def _read(self) -> None:
        """Take what is on the disk, and cut off the beginning of a line that never was durable."""
        content = _parse(self._bytes(), self.path)
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
            fcntl.flock(self._file, fcntl.LOCK_UN)  # a forked worker would keep it otherwise
        os.close(self._file)


class Account:
    """What one run has reserved on a ledger file, and how much of it is used.

    `block` is the most releases that are reserved at a time. `forecast(n)` may tell the events of
    the next n lots; without it blocks of equal events grow as they are used up.
    """

    def __init__(
        self,
        file: LedgerFile,
        run: str,
        about: dict[str, Any],
        block: int,
        forecast: Forecast | None,
        session: str | None = None,
    ) -> None:
        self.file, self.run, self.about = file, run, about
        # Two copies of a run that both go on must not look like one.
        self.session = session or secrets.token_hex(8)
        self.block, self.forecast = block, forecast
        self._left: Counter[tuple[float, float]] = Counter()
        self._used: Counter[tuple[float, float]] = Counter()
        self._block = ""  # the hash of the line that reserved what is left
        self._reserved: Counter[tuple[float, float]] = Counter()
        self._last_key: tuple[float, float] | None = None
        self._last_size = 0
        self._opened = False

    def open(self) -> None:
        """Have the name of the run on the disk."""
        self.file.check()
        if not self._opened:
            self._append([])

    def cover(self, event: Event) -> None:
        """Return when the cost of `event` is on the disk. Called before its noise is drawn."""
        self.file.check()
        key = event.sample_rate, event.noise_multiplier
        if self._left[key] < 1:
            self._reserve(key)
        self._left[key] -= 1
        self._used[key] += 1
        self._last_key = key

    def settle(self) -> None:
        """Give back what is left of the open block."""
        self.file.check()
        lines = self._spent()
        self._left = Counter()  # first: whatever interrupts this, nothing is used any more
        if lines:
            self._append(lines)

    def rename(self, run: str) -> None:
        """Go on as another run, of which nothing was charged here yet."""
        self.settle()
        self.run, self._opened = run, False

    def forget(self) -> None:
        """All of the open block counts as used."""
        self._left, self._used = Counter(), Counter()

    def note(self, of: str, digest: str) -> None:
        """Remember the digest of something that was released."""
        line = {"kind": "digest", "run": self.run, "of": of, "hash": digest}
        self._append([line], durable=False)

    def digest(self, of: str) -> str | None:
        """The digest of what was released under that name, if something was."""
        return self.file.content.digests.get(of)

    def _reserve(self, key: tuple[float, float]) -> None:
        """Put a block that holds `key` on the disk."""
        events = list(self.forecast(self.block)) if self.forecast else []
        block = Counter({_key(e): e.count for e in merge(events)})
        if not block[key]:
            # Nobody foresaw it: twice as many as last time, where it was the same again.
            self._last_size = 2 * self._last_size if key == self._last_key else 1
            self._last_size = min(self._last_size, self.block)
            block = Counter({key: self._last_size})
        lines = self._spent()
        rows = [_row(Event(rate, noise, n)) for (rate, noise), n in sorted(block.items()) if n]
        lines.append({"kind": "reserve", "run": self.run, "events": rows})
        self._left = Counter()
        self._block = self._append(lines)
        self._used, self._reserved = Counter(), block.copy()
        self._left = block

    def _spent(self) -> list[dict[str, Any]]:
        """The line that gives back what is left, if anything is."""
        if not self._opened or not +self._left or not self._used <= self._reserved:
            return []  # the last: an interrupt has confused the counts, and all of it is charged
        rows = [_row(Event(rate, noise, n)) for (rate, noise), n in sorted(self._used.items()) if n]
        return [{"kind": "spent", "run": self.run, "block": self._block, "events": rows}]

    def _append(self, lines: Sequence[Mapping[str, Any]], durable: bool = True) -> str:
        if self._opened:
            return self.file.append(lines, durable)
        last = self.file.append([self.opening(), *lines])
        self._opened = True
        return last

    def opening(self) -> dict[str, Any]:
        """The line that begins a session of the run."""
        return {
            "kind": "open",
            "version": _VERSION,
            "run": self.run,
            "session": self.session,
            "about": self.about,
        }


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
    merged: dict[str, Spending] = {}
    for path in paths:
        for run in read(path).runs.values():
            known = merged.setdefault(run.run, Spending(run.run, dict(run.about)))
            _add_session(known, run.about)
            known.noted |= run.noted
            for line, block in run.blocks.items():
                known.blocks[line] = _larger(known.blocks.get(line, ()), block)
    facts = together(run.facts for run in merged.values())
    about = {
        "data": common_data(run.about for run in merged.values()),
        "merged": sorted(merged),
        "adjacency": facts.adjacency,
        "test_mode": facts.test_mode,
    }
    file = LedgerFile(out)
    account = file.account(_chain("", {"merged": sorted(merged)})[:16], about)
    events = merge(event for run in merged.values() for event in run.events)
    rows = [_row(event) for event in events]
    file.append([account.opening(), {"kind": "reserve", "run": account.run, "events": rows}])
    file.close()
    return file.content


def common_data(abouts: Iterable[Mapping[str, Any]]) -> Any:
    """The data that all these runs are about; ConfigError where it is not the same."""
    found: list[Any] = []
    for about in abouts:
        if about.get("data") not in found:
            found.append(about.get("data"))
    if len(found) > 1:
        raise ConfigError(
            "the ledgers are about different data, whose spending does not add up: "
            + "; ".join(json.dumps(data) for data in found)
        )
    return found[0] if found else None


def _larger(one: tuple[Event, ...], other: tuple[Event, ...]) -> tuple[Event, ...]:
    """The same reserve in two copies: each kind of event as often as in the copy with more."""
    counts = Counter({_key(e): e.count for e in one}) | Counter({_key(e): e.count for e in other})
    return merge(Event(rate, noise, n) for (rate, noise), n in counts.items())


def _check_kind(path: Path, found: os.stat_result) -> None:
    """Refuse what is no ordinary file: it keeps nothing, or waits for somebody for ever."""
    if not stat.S_ISREG(found.st_mode):
        kind = "a folder" if stat.S_ISDIR(found.st_mode) else "a device, a pipe or a socket"
        raise ConfigError(
            f"the ledger {str(path)!r} is {kind}, not a file that keeps what is written to it: "
            "give the path of a ledger, or one where nothing is yet."
        )


def _open_locked(path: Path, create: bool) -> int:
    try:
        new = not path.exists()
        if not new:
            _check_kind(path, path.stat())  # before it is opened: a device may do something
        flags = os.O_RDWR | os.O_APPEND | os.O_NONBLOCK | (os.O_CREAT if create else 0)
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
    try:
        _check_kind(path, os.fstat(file))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ConfigError:
        os.close(file)
        raise
    except OSError:
        os.close(file)
        raise ConfigError(
            f"the ledger {str(path)!r} is in use by another run: wait until it ends. In one "
            "process, share it: PrivacyEngine(ledger=other_engine.ledger)."
        ) from None
    if new:
        sync_folder(path.parent)
    return file


def _key(event: Event) -> tuple[float, float]:
    return event.sample_rate, event.noise_multiplier


def _row(event: Event) -> list[Any]:
    noise = event.noise_multiplier
    return [event.sample_rate, noise if math.isfinite(noise) else "inf", event.count]


def _event(row: Any) -> Event:
    rate, noise, count = row
    return Event(rate, math.inf if noise == "inf" else noise, count)


def _chain(last: str, line: Mapping[str, Any]) -> str:
    body = json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{last}\n{body}".encode()).hexdigest()[:32]


def _parse(data: bytes, path: Path) -> Content:
    content = Content()
    *lines, rest = data.split(b"\n")
    if not data.startswith(_BEGINNINGS) and not _FIRST.startswith(data):
        raise ConfigError(
            f"line 1 of {str(path)!r} is not that of a ledger: the file was left as it is. Give "
            "the ledger.jsonl of a run, or a path where nothing is yet."
        )
    for number, text in enumerate(lines, start=1):
        try:
            _add(content, json.loads(text))
        except _NO_LINE:
            raise _damaged(path, number) from None
        content.length += len(text) + 1
    try:
        line, end = json.JSONDecoder().raw_decode(rest.decode())
    except _NO_LINE:
        # The beginning of a line was never durable. Anything else is not from here, except for
        # the zeros that a file system may leave where it lost power.
        possible = _BEGINNINGS if lines else (_FIRST,)
        begun = any(rest.startswith(b) or b.startswith(rest) for b in possible)
        if begun or not rest.strip(b"\0"):
            return content
        raise _damaged(path, len(lines) + 1) from None
    # A whole line may have been durable: it counts, and where it or its end was changed into
    # something else the file is damaged.
    try:
        _add(content, line)
    except _NO_LINE:
        raise _damaged(path, len(lines) + 1) from None
    if end < len(rest.decode()):
        raise _damaged(path, len(lines) + 1)
    content.length, content.open_end = content.length + len(rest), True
    return content


_NO_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


def _add(content: Content, line: Any) -> None:
    chain = line.pop("chain")
    if chain != _chain(content.last, line):
        raise ValueError
    _take(content, line, chain)
    content.last = chain


def _damaged(path: Path, number: int) -> ConfigError:
    return ConfigError(
        f"line {number} of the ledger {str(path)!r} is damaged or was changed: what was spent is "
        "no longer known. Restore the file from a copy; without one, treat the data as spent."
    )


def _add_session(spending: Spending, about: Mapping[str, Any]) -> None:
    """A run is as private as the least private of its sessions."""
    facts = together([spending.facts, Spending(spending.run, dict(about)).facts])
    if facts != Facts():
        spending.about |= {"adjacency": facts.adjacency, "test_mode": facts.test_mode}


def _take(content: Content, line: Mapping[str, Any], chain: str) -> None:
    """Add one line to the content; ValueError and the like for one that cannot be there."""
    kind, run = line["kind"], line["run"]
    if set(line) != _FIELDS[kind] | {"kind"} or not isinstance(run, str):
        raise ValueError
    if kind == "open":
        if line["version"] != _VERSION or not isinstance(line["about"], dict):
            raise ValueError
        spending = content.runs.setdefault(run, Spending(run, dict(line["about"])))
        _add_session(spending, line["about"])
        content.sessions.add(str(line["session"]))
        spending.openings += 1
        return
    spending = content.runs[run]
    if kind == "digest":
        if not isinstance(line["of"], str) or not isinstance(line["hash"], str):
            raise ValueError
        content.digests[line["of"]] = line["hash"]
        spending.noted = True
        return
    events = merge(_event(row) for row in line["events"])
    if kind == "reserve":
        spending.blocks[chain] = events
        return
    # What is given back can only make its block smaller.
    block = line["block"]
    reserved = Counter({_key(e): e.count for e in spending.blocks[block]})
    if any(e.count > reserved[_key(e)] for e in events):
        raise ValueError
    spending.blocks[block] = events
