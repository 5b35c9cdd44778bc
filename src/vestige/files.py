"""Files that appear whole or not at all, and are on the disk when the call returns."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def replace_file(path: Path, content: bytes, mode: int = 0o644) -> None:
    """A whole file in place of the one that is there; OSError leaves that one as it was."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        partial.unlink(missing_ok=True)
        file = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            write_all(file, content)
            os.fsync(file)
        finally:
            os.close(file)
        partial.replace(path)
        sync_folder(path.parent)
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def write_all(file: int, content: bytes) -> None:
    """Write to a file descriptor until nothing is left."""
    view = memoryview(content)
    while view:
        view = view[os.write(file, view) :]


def sync_folder(folder: Path) -> None:
    """Wait until the names in a folder are on the disk."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
