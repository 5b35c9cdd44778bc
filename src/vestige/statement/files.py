"""The statement in a run folder: read back, and refused in one line if it is damaged."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vestige.errors import ConfigError
from vestige.statement.schema import check

JSON_FILE, MARKDOWN_FILE = "statement.json", "statement.md"
_LARGEST = 64 * 2**20  # bytes; a schedule of a million steps stays below
_RUN_FILES = ("config.json", "result.json", "metrics.jsonl", "ledger.jsonl")


def read(folder: Path) -> dict[str, Any]:
    """The checked statement of a run folder; ConfigError where there is none or it is damaged."""
    if not folder.is_dir():
        raise ConfigError(f"{str(folder)!r} is no folder: give a run folder of vestige train.")
    path = folder / JSON_FILE
    if not path.is_file():
        there = [name for name in _RUN_FILES if (folder / name).is_file()]
        why = (
            f": it holds {', '.join(there)}, so the run was killed before its end or was made by "
            "an earlier version"
            if there
            else ", and no other file of a run: give a run folder of vestige train"
        )
        raise ConfigError(f"the folder {str(folder)!r} has no {JSON_FILE}{why}.")
    try:
        if path.stat().st_size > _LARGEST:
            raise _damaged(path, f"it is larger than {_LARGEST >> 20} MiB")
        found = json.loads(path.read_text(encoding="utf-8"), parse_constant=_not_json)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}): check the folder.") from error
    except (ValueError, RecursionError) as error:
        raise _damaged(path, "it is no JSON") from error
    try:
        check(found)
    except ConfigError as error:
        raise _damaged(path, str(error)) from error
    assert isinstance(found, dict)
    return found


def _not_json(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _damaged(path: Path, what: str) -> ConfigError:
    return ConfigError(f"{path} is damaged ({what}): restore it, or train again.")
