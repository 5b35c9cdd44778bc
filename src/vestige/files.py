"""Files that appear whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path

_BINARY = getattr(os, "O_BINARY", 0)  # Windows would write two bytes for a newline


def write_whole(path: Path, content: bytes | str, mode: int | None = None) -> None:
    """Put a whole file in place of the one that is there. Text is written as UTF-8.

    Guarantee: whatever stops this call, the path has the earlier content or the new one, and after
    it has returned the new one is on the disk. OSError leaves the earlier file as it was.

    `mode` is that of the new file, from its first byte on; without it the file keeps the mode that
    it has, or is made as the umask says. What is no plain file (a pipe, a terminal) is written to.
    """
    data = content.encode() if isinstance(content, str) else content
    earlier = _mode_of(path)
    if earlier is not None and stat.S_ISDIR(earlier):
        raise IsADirectoryError(errno.EISDIR, "this is a folder, name a file", str(path))
    if earlier is not None and not stat.S_ISREG(earlier):
        path.write_bytes(data)
        return
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
        file = os.open(partial, flags, 0o644 if mode is None else mode)
        try:
            write_all(file, data)
            os.fsync(file)
        finally:
            os.close(file)
        if mode is None and earlier is not None:
            partial.chmod(stat.S_IMODE(earlier))
        partial.replace(path)
        sync_folder(path.parent)
    except OSError as error:
        error.filename, error.filename2 = str(path), None  # people know no name beside it
        raise
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def _mode_of(path: Path) -> int | None:
    """Type and mode of what is at the path; None where there is nothing."""
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return None


def write_all(file: int, content: bytes) -> None:
    """Write to a file descriptor until nothing is left: a write may stop short on a full disk."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(file, rest) :]


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk, where a system can be asked for that."""
    if os.name == "nt":  # Windows opens no folders; NTFS logs changes of names
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
