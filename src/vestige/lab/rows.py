"""The rows of all experiments: one append-only file, shared by every process that adds to it.

`rows.jsonl` holds one JSON object on each line. Rows are added under a lock, whole or not at all,
and flushed to the disk before the next one starts. A line that was cut (a killed process, a full
disk, an editor) is set aside in `rows.torn.jsonl` and its row is run again; no other line is
touched. Which rows are being run is said by locks on bytes of `rows.lock`, one byte for each hash:
the system gives a lock back when its process ends, in whatever way, so that no row stays claimed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from vestige.errors import ConfigError
from vestige.files import write_all, write_whole
from vestige.lab.grid import Row
from vestige.lab.setting import config_hash

ROWS, TORN, LOCK = "rows.jsonl", "rows.torn.jsonl", "rows.lock"
_APPENDING = 2**60  # a byte beyond those of the hashes
_NEEDED = ("hash", "config", "seconds")


class Rows:
    """The finished rows below a folder, read as they come in. Reading needs no lock and no write.

    `complaints` are sentences about lines that were passed over.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / ROWS
        self.complaints: list[str] = []
        self._rows: dict[str, Row] = {}
        self._position = 0
        self._file = 0  # its inode: a repaired file is another one

    def refresh(self) -> Mapping[str, Row]:
        """The rows by hash, with those that were added since the last call."""
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._file or state.st_size < self._position:
                    self._rows, self._position, self._file = {}, 0, state.st_ino
                if state.st_size == self._position:
                    return self._rows
                file.seek(self._position)
                text = file.read()
        except FileNotFoundError:
            return self._rows
        except OSError as error:
            raise ConfigError(
                f"the rows in {self.path} cannot be read ({error.strerror}): check the folder."
            ) from error
        whole = text.rfind(b"\n") + 1  # the rest may be a row that is being written
        for line in text[:whole].splitlines():
            row = parsed(line)
            if row is not None:
                self._rows.setdefault(row["hash"], row)
            elif line.strip():
                self._complain(f"{self.path} has a damaged line, which was passed over.")
        self._position += whole
        return self._rows

    def _complain(self, sentence: str) -> None:
        if sentence not in self.complaints:
            self.complaints.append(sentence)


def parsed(line: bytes) -> Row | None:
    """The row on a line; None where it is cut, no row, or not the row that its hash names."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or any(key not in row for key in _NEEDED):
        return None
    try:
        same = isinstance(row["config"], dict) and config_hash(row["config"]) == row["hash"]
    except (TypeError, ValueError, RecursionError):
        return None
    return row if same else None


class RowStore(Rows):
    """Rows that are added to, by this and other processes. One for each process and folder.

    Guarantee: a row that `append` has returned from is on the disk, and survives whatever happens
    to this or another process; no row is ever half there for a reader.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = os.open(root / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise ConfigError(
                f"the results folder {str(root)!r} cannot be written ({error.strerror}): give "
                "another one as --out."
            ) from error
        try:
            self.repair()
            self.refresh()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RowStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give every claim back."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    @contextlib.contextmanager
    def claim(self, hash_: str) -> Iterator[bool]:
        """While entered, no other process runs this row. False where one already does."""
        with self._locked(int(hash_, 16) % _APPENDING, wait=False) as mine:
            yield mine

    def append(self, row: Row) -> None:
        """Add a row, whole, and see it on the disk. OSError where the disk is full."""
        line = f"{json.dumps(row, allow_nan=False, separators=(',', ':'))}\n".encode()
        with self._locked(_APPENDING, wait=True):
            if not self._ends_with_a_line():
                self._repair()  # another process was killed while it wrote
            try:
                file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            except OSError as error:
                raise self._unwritten(error) from error
            try:
                before = os.fstat(file).st_size
                try:
                    write_all(file, line)
                    os.fsync(file)
                except OSError as error:
                    with contextlib.suppress(OSError):
                        os.ftruncate(file, before)
                    raise self._unwritten(error) from error
            finally:
                os.close(file)

    def repair(self) -> None:
        """Set damaged lines aside, so that what follows them stays readable."""
        with self._locked(_APPENDING, wait=True):
            self._repair()

    def _ends_with_a_line(self) -> bool:
        try:
            with self.path.open("rb") as file:
                if not os.fstat(file.fileno()).st_size:
                    return True
                file.seek(-1, os.SEEK_END)
                return file.read(1) == b"\n"
        except FileNotFoundError:
            return True

    def _repair(self) -> None:
        try:
            content = self.path.read_bytes()
        except FileNotFoundError:
            return
        except OSError as error:
            raise self._unwritten(error) from error
        good: list[bytes] = []
        bad: list[bytes] = []
        for line in content.splitlines():
            if line.strip():
                (bad if parsed(line) is None else good).append(line + b"\n")
        if b"".join(good) == content:
            return
        try:
            if bad:
                with (self.root / TORN).open("ab") as torn:
                    torn.writelines(bad)
                    torn.flush()
                    os.fsync(torn.fileno())
            write_whole(self.path, b"".join(good))
        except OSError as error:
            raise self._unwritten(error) from error
        if bad:
            self._complain(
                f"{self.path} had {len(bad)} cut or damaged line(s): set aside in "
                f"{self.root / TORN}; those rows are run again, the other {len(good)} are kept."
            )

    def _unwritten(self, error: OSError) -> OSError:
        cause = error.strerror or str(error)
        advice = "free some space" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "mend that"
        return OSError(
            f"a row could not be added to {self.path} ({cause}): every finished row before it is "
            f"kept; {advice} and give the same command again."
        )

    @contextlib.contextmanager
    def _locked(self, byte: int, wait: bool) -> Iterator[bool]:
        import fcntl

        how = fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB
        try:
            fcntl.lockf(self._lock, how, 1, byte)
            held = True
        except OSError as error:
            if wait or error.errno not in (errno.EACCES, errno.EAGAIN):
                raise
            held = False
        try:
            yield held
        finally:
            if held and self._lock >= 0:
                fcntl.lockf(self._lock, fcntl.LOCK_UN, 1, byte)


def merge(store: RowStore, source: Path) -> tuple[int, int]:
    """Add the rows of another rows.jsonl that are not there yet; returns (added, known)."""
    if not source.is_file():
        raise ConfigError(f"there is no file {str(source)!r} to merge: give a rows.jsonl.")
    added = known = 0
    for line in source.read_bytes().splitlines():
        row = parsed(line)
        if row is None:
            continue
        if row["hash"] in store.refresh():
            known += 1
        else:
            store.append(row)
            added += 1
    return added, known
