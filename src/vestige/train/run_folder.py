"""The folder of a run: where it is, and files that appear whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from types import TracebackType
from typing import Any

from vestige.errors import ConfigError, StorageError
from vestige.files import write_whole

LEDGER = "ledger.jsonl"


class RunFolder:
    """The folder of a run. Files appear whole or not at all.

    If the run fails before `keep` was set (at the first release), the folder disappears again.
    """

    durable = True  # whether the ledger and checkpoints are kept in it

    def __init__(self, out: Path | None, name: str) -> None:
        self.keep = False
        self._written: list[Path] = []
        safe = re.sub(r"[^\w.-]", "_", name)
        self._default = Path("runs") / f"{safe}-{datetime.now().strftime('%Y%m%d-%H%M%S')}"
        self._out = out

    def __enter__(self) -> RunFolder:
        self.path = self._out if self._out is not None else self._default
        self._made = [p for p in (self.path, *self.path.parents) if not p.exists()]
        try:
            if self._out is not None:
                check_out(self._out, fresh=True)  # it may have filled up in the meantime
                self._out.mkdir(parents=True, exist_ok=True)
            else:
                self._make_default()
        except OSError as error:
            raise ConfigError(
                f"the run folder {str(self.path)!r} cannot be made ({error.strerror}): give "
                "another one as out."
            ) from error
        return self

    def _make_default(self) -> None:
        """Runs that start in the same second get the suffixes -2, -3, ..."""
        number = 1
        while True:
            try:
                self.path.mkdir(parents=True)
                return
            except FileExistsError:
                number += 1
                self.path = self._default.with_name(f"{self._default.name}-{number}")
                self._made = [self.path]

    def __exit__(
        self, kind: type[BaseException] | None, _: object, __: TracebackType | None
    ) -> None:
        if kind is None or self.keep:
            return
        for file in self._written:
            file.unlink(missing_ok=True)
            for secret in self.path.glob(f"*{file.name}.*.secret*"):
                secret.unlink(missing_ok=True)
        for folder in self._made:
            with contextlib.suppress(OSError):
                folder.rmdir()

    def own(self, name: str) -> Path:
        """The path of a file of this run that somebody else writes."""
        path = self.path / name
        if path not in self._written:
            self._written.append(path)
        return path

    def write(self, name: str, content: bytes) -> None:
        """A whole file, or, if it fails, none."""
        path = self.path / name
        try:
            write_whole(path, content)
        except OSError as error:
            raise StorageError(
                f"{str(path)!r} cannot be written ({error.strerror}): make room, or make the "
                "folder writable, and resume the run."
            ) from error
        self._written.append(path)

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """A JSON file for people and machines."""
        self.write(name, f"{json.dumps(value, indent=2, allow_nan=False)}\n".encode())

    def write_lines(self, name: str, values: list[dict[str, Any]]) -> None:
        """One JSON object on each line, rewritten as a whole: no line is ever half there."""
        self.write(name, "".join(f"{json.dumps(v, allow_nan=False)}\n" for v in values).encode())


class ExistingFolder(RunFolder):
    """The folder of a run that is resumed: it stays whatever happens."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, path.name)
        self.path, self.keep = path, True

    def __enter__(self) -> ExistingFolder:
        return self


def run_ledger(folder: Path, saved: Path | str | None, named: Path | str | None) -> Path:
    """The ledger of the run in `folder`, whose checkpoint has `saved` its path.

    The folder may be somebody else's, so it can name files inside itself and no others: those have
    to be `named` by whoever asks.
    """
    if named is not None:
        return Path(named)
    path = folder / LEDGER if saved is None else Path(saved)
    try:
        inside = path.resolve().is_relative_to(folder.resolve())
    except (OSError, RuntimeError, ValueError):
        inside = False
    if not inside:
        raise ConfigError(
            f"the run in {str(folder)!r} has its ledger outside of its folder: if {str(path)!r} is "
            "yours, name it with --ledger (in Python, ledger=...)."
        )
    return path


def check_out(folder: Path, fresh: bool) -> None:
    """Refuse a run folder that is in use or cannot be made; nothing is created."""
    try:
        if fresh and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"out {str(folder)!r} is in use: it is a folder with files in it; give a new or "
                "empty one."
            )
        nearest = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    except OSError as error:
        raise ConfigError(
            f"out {str(folder)!r} cannot be used ({error.strerror}): give another folder."
        ) from error
    if not nearest.is_dir():
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {str(nearest)!r} is not a folder; give another."
        )
    if not os.access(nearest, os.W_OK | os.X_OK):
        raise ConfigError(
            f"out {str(folder)!r} cannot be made: {str(nearest)!r} is not writable; give another."
        )
