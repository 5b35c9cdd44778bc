"""The lines of a ledger file, and what they say together.

    open      a run begins, or goes on after a resume
    reserve   these events are charged from now on
    spent     of that reserve, only these were used
    digest    test mode: the hash of something released, so that a replay can be compared

Every line carries the hash of all lines before it, so a line that was changed, removed or moved is
found. A last line without its end was never durable, paid for nothing, and is dropped; a file that
does not begin as a ledger is refused and left as it is.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.plan import ADJACENCY
from vestige.privacy.events import Event, counts, merge
from vestige.privacy.ledger import Facts, together

VERSION = 1
_FIELDS = {
    "open": {"version", "run", "session", "about"},
    "reserve": {"run", "events"},
    "spent": {"run", "block", "events"},
    "digest": {"run", "of", "hash"},
}
# How every line begins that a ledger file is given, and the first one in particular.
_BEGINNINGS = tuple(f'{{"kind": "{kind}", '.encode() for kind in _FIELDS)
_FIRST = _BEGINNINGS[0] + f'"version": {VERSION}, "run": "'.encode()
# What reading a line that is none may raise.
_NO_LINE = (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError)


@dataclass
class RunRecord:
    """What one run has on a ledger file: its public facts and its events."""

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

    def add_session(self, about: Mapping[str, Any]) -> None:
        """A run is as private as the least private of its sessions."""
        facts = together([self.facts, RunRecord(self.run, dict(about)).facts])
        if facts != Facts():
            self.about |= {"adjacency": facts.adjacency, "test_mode": facts.test_mode}


@dataclass
class Content:
    """What a ledger file says."""

    runs: dict[str, RunRecord] = field(default_factory=dict)
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

    def take(self, line: Mapping[str, Any]) -> None:
        """Add one line, without its hash; ValueError and the like where it cannot be there."""
        last = chain(self.last, line)
        kind, run = line["kind"], line["run"]
        if set(line) != _FIELDS[kind] | {"kind"} or not isinstance(run, str):
            raise ValueError
        if kind == "open":
            if line["version"] != VERSION or not isinstance(line["about"], dict):
                raise ValueError
            record = self.runs.setdefault(run, RunRecord(run, dict(line["about"])))
            record.add_session(line["about"])
            record.openings += 1
            self.sessions.add(str(line["session"]))
        elif kind == "digest":
            if not isinstance(line["of"], str) or not isinstance(line["hash"], str):
                raise ValueError
            self.digests[line["of"]] = line["hash"]
            self.runs[run].noted = True
        else:
            events = merge(Event.from_row(row) for row in line["events"])
            blocks, block = self.runs[run].blocks, last if kind == "reserve" else line["block"]
            # What is given back can only make its block smaller.
            if kind == "spent" and not counts(events) <= counts(blocks[block]):
                raise ValueError
            blocks[block] = events
        self.last = last

    def take_written(self, line: Any) -> None:
        """Add one line as it is in a file; ValueError and the like for a wrong one."""
        if line.pop("chain") != chain(self.last, line):
            raise ValueError
        self.take(line)


def chain(last: str, line: Mapping[str, Any]) -> str:
    """The hash of a line and of the one before it, and so of all lines before it."""
    body = json.dumps(line, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(f"{last}\n{body}".encode()).hexdigest()[:32]


def written(last: str, line: Mapping[str, Any]) -> tuple[bytes, str]:
    """The bytes of a line that follows the one with the hash `last`, and its own hash."""
    own_hash = chain(last, line)
    return json.dumps({**line, "chain": own_hash}, allow_nan=False).encode() + b"\n", own_hash


def read(path: Path) -> Content:
    """What a ledger file says; ConfigError for one that is damaged or is no ledger."""
    try:
        check_kind(path, path.stat())
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the ledger {str(path)!r} cannot be read ({error.strerror}): give the ledger.jsonl "
            "of a run."
        ) from error
    return parse(data, path)


def check_kind(path: Path, status: os.stat_result) -> None:
    """Refuse what is no ordinary file: it keeps nothing, or waits for somebody for ever."""
    if not stat.S_ISREG(status.st_mode):
        kind = "a folder" if stat.S_ISDIR(status.st_mode) else "a device, a pipe or a socket"
        raise ConfigError(
            f"the ledger {str(path)!r} is {kind}, not a file that keeps what is written to it: "
            "give the path of a ledger, or one where nothing is yet."
        )


def parse(data: bytes, path: Path) -> Content:
    """What these bytes of the file at `path` say; ConfigError names the first damaged line."""
    content = Content()
    *lines, rest = data.split(b"\n")
    if not data.startswith(_BEGINNINGS) and not _FIRST.startswith(data):
        raise ConfigError(
            f"line 1 of {str(path)!r} is not that of a ledger: the file was left as it is. Give "
            "the ledger.jsonl of a run, or a path where nothing is yet."
        )
    try:
        for text in lines:
            content.take_written(json.loads(text))
            content.length += len(text) + 1
        if _is_torn(rest, _BEGINNINGS if lines else (_FIRST,)):
            return content
        # A whole line may have been durable: it counts, and where it or its end was changed into
        # something else the file is damaged.
        if rest != rest.strip():
            raise ValueError
        content.take_written(json.loads(rest))
    except _NO_LINE:
        number = data[: content.length].count(b"\n") + 1
        raise ConfigError(
            f"line {number} of the ledger {str(path)!r} is damaged or was changed: what was spent "
            "is no longer known. Restore the file from a copy; without one, treat the data as "
            "spent."
        ) from None
    content.length, content.open_end = content.length + len(rest), True
    return content


def _is_torn(rest: bytes, possible: tuple[bytes, ...]) -> bool:
    """Whether this is the beginning of a line, which was never durable, and no whole one.

    Anything else is not from here, except for the zeros that a file system may leave where it lost
    power.
    """
    try:
        json.JSONDecoder().raw_decode(rest.decode())
    except _NO_LINE:
        begun = any(rest.startswith(first) or first.startswith(rest) for first in possible)
        return begun or not rest.strip(b"\0")
    return False
