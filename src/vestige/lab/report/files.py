"""Files that appear whole or not at all."""

from __future__ import annotations

from pathlib import Path

from vestige.files import write_whole


def write_text(path: Path, content: str) -> Path:
    """Write a text file and return its path. OSError says what stays and what to do."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, content)
    except OSError as error:
        raise OSError(
            f"the report {path} cannot be written ({error.strerror}): what it is made of is "
            "untouched; mend that and give the same command again."
        ) from error
    return path
