"""The rows of all experiments: one append-only file, shared by every process that adds to it.

`rows.jsonl` holds one JSON object on each line. Rows are added under a lock, whole or not at all,
and flushed to the disk before the next one starts. A line that was cut (a killed process, a full
disk, an editor) is set aside in `rows.torn.jsonl` and its row is run again; no other line is
touched. Which rows are being run is said by locks in the folder `rows.claims`, one for each hash:
the system gives a lock back when its process ends, in whatever way, so that no row stays claimed.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from filelock import FileLock, Timeout

from vestige.errors import ConfigError
from vestige.files import write_all, write_whole
from vestige.lab.grid import Row
from vestige.lab.setting import config_hash

ROWS, TORN, LOCK, CLAIMS = "rows.jsonl", "rows.torn.jsonl", "rows.lock", "rows.claims"
_IMAGES = ("dataset", "features", "train_range", "test_range", "validation_range")
_NEEDED = ("hash", "config", "seconds")


class Rows:
    """The finished rows below a folder, read as they come in. Reading needs no lock and no write.

    `complaints` are sentences about lines that were passed over.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.path = root, root / ROWS
        self.complaints: list[str] = []
        self._rows: dict[str, Row] = {}
        self._digests: dict[str, str] = {}  # of the images that rows were made of
        self._position = 0
        self._file = 0  # its inode: a repaired file is another one

    def refresh(self) -> Mapping[str, Row]:
        """The rows by hash, with those that were added since the last call.

        ConfigError where rows of the same images have two digests: two versions of a benchmark
        must not meet in one table.
        """
        try:
            with self.path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._file or state.st_size < self._position:
                    self._rows, self._digests = {}, {}
                    self._position, self._file = 0, state.st_ino
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
                _check_images(row, self._digests, self.path)
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
    """Rows that are added to, by this and other processes.

    Guarantee: a row that `append` has returned from is on the disk, and survives whatever happens
    to this or another process; no row is ever half there for a reader.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        try:
            root.mkdir(parents=True, exist_ok=True)
            self._lock = FileLock(root / LOCK)
            with self._lock:
                self._repair()
        except OSError as error:
            raise ConfigError(
                f"the results folder {str(root)!r} cannot be written ({error.strerror or error}): "
                "give another one as --out."
            ) from error
        self.refresh()

    @contextlib.contextmanager
    def claim(self, hash_: str) -> Iterator[bool]:
        """While entered, no other process runs this row. False where one already does."""
        folder = self.root / CLAIMS
        folder.mkdir(exist_ok=True)
        lock = FileLock(folder / hash_)
        try:
            lock.acquire(blocking=False)
        except Timeout:
            yield False
            return
        try:
            yield True
        finally:
            # While it is held: whoever waits for the name finds that it is gone, and starts over.
            (folder / hash_).unlink(missing_ok=True)
            lock.release()

    def append(self, row: Row) -> None:
        """Add a row, whole, and see it on the disk. OSError where the disk is full.

        ConfigError for a row of other images than the rows here that name the same ones.
        """
        line = f"{json.dumps(row, allow_nan=False, separators=(',', ':'))}\n".encode()
        with self._lock:
            self.refresh()
            _check_images(row, dict(self._digests), self.path)
            try:
                if not self._ends_with_a_line():
                    self._repair()  # another process was killed while it wrote
                file = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
                try:
                    _add(file, line)
                finally:
                    os.close(file)
            except OSError as error:
                full = error.errno in (errno.ENOSPC, errno.EDQUOT)
                raise OSError(
                    f"a row could not be added to {self.path} ({error.strerror or error}): every "
                    f"finished row before it is kept; {'free some space' if full else 'mend that'} "
                    "and give the same command again."
                ) from error

    def _ends_with_a_line(self) -> bool:
        if not self.path.exists() or not self.path.stat().st_size:
            return True
        with self.path.open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read(1) == b"\n"

    def _repair(self) -> None:
        """Set damaged lines aside, so that what follows them stays readable."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        good: list[bytes] = []
        bad: list[bytes] = []
        for line in content.splitlines():
            if line.strip():
                (bad if parsed(line) is None else good).append(line + b"\n")
        if b"".join(good) == content:
            return
        if bad:
            torn = self.root / TORN
            before = torn.read_bytes() if torn.exists() else b""
            write_whole(torn, before + b"".join(bad))
        write_whole(self.path, b"".join(good))
        if bad:
            self._complain(
                f"{self.path} had {len(bad)} cut or damaged line(s): set aside in "
                f"{self.root / TORN}; those rows are run again, the other {len(good)} are kept."
            )


def _add(file: int, line: bytes) -> None:
    """Write a line to the end of a file, whole and on the disk, or not at all."""
    before = os.fstat(file).st_size
    try:
        write_all(file, line)
        os.fsync(file)
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
        raise


def _check_images(row: Row, digests: dict[str, str], path: Path) -> None:
    """Refuse a row whose images are not those of the rows before it that name the same ones."""
    images = json.dumps([row["config"].get(name) for name in _IMAGES])
    if row.get("data") and digests.setdefault(images, row["data"]) != row["data"]:
        raise ConfigError(
            f"the row {row['hash']} is of another {row['config'].get('dataset')} than the rows "
            f"before it in {str(path)!r} (digests {row['data']} and {digests[images]}): rows of "
            "two files must not meet in one table; keep them in a folder of their own, by --out."
        )


def merge(store: RowStore, source: Path) -> tuple[int, int]:
    """Add the rows of another rows.jsonl that are not there yet; returns (added, known).

    Nothing is added where rows of the same images have another digest: two versions of a benchmark
    must not meet in one table.
    """
    if not source.is_file():
        raise ConfigError(f"there is no file {str(source)!r} to merge: give a rows.jsonl.")
    rows = [row for line in source.read_bytes().splitlines() if (row := parsed(line)) is not None]
    store.refresh()
    digests = dict(store._digests)
    for row in rows:
        _check_images(row, digests, store.path)
    added = known = 0
    for row in rows:
        if row["hash"] in store.refresh():
            known += 1
        else:
            store.append(row)
            added += 1
    return added, known
