"""Files that appear whole or not at all."""

from __future__ import annotations

import contextlib
from pathlib import Path


def write_text(path: Path, content: str) -> Path:
    """Write a text file and return its path. OSError says what stays and what to do."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(content, encoding="utf-8", newline="\n")
        partial.replace(path)
    except OSError as error:
        raise OSError(
            f"the report {path} cannot be written ({error.strerror}): what it is made of is "
            "untouched; mend that and give the same command again."
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return path
