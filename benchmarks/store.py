"""Figures of one commit on one machine, in one JSON file.

A file says what it was measured on, and takes rows of nothing else. A row is one engine on one case
of a section; it is written as soon as it is measured, and is measured anew only if that is asked
for.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from shutil import which
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
MEASURED = ("src", "benchmarks/*.py")  # what figures are of: new results change no commit
Row = dict[str, Any]
Key = tuple[str, str, str]


class OtherMachineError(ValueError):
    """The file holds figures of another commit or machine."""


class Results:
    """The rows of a file, merged one by one."""

    def __init__(self, path: Path, machine: dict[str, Any]) -> None:
        self.path, self.machine = path, machine
        self.rows: dict[Key, Row] = {}
        if path.exists():
            held = json.loads(path.read_text())
            self._check(held["machine"])
            self.machine = held["machine"]
            self.rows = {key(row): row for row in held["rows"]}

    def _check(self, held: dict[str, Any]) -> None:
        apart = [
            f"{name} {held.get(name)}, now {value}"
            for name, value in self.machine.items()
            if name != "measured" and held.get(name) != value
        ]
        if apart:
            raise OtherMachineError(
                f"{self.path} holds figures of another commit or machine ({'; '.join(apart)}): "
                "rows of two are never in one file. Leave --out away for a file that is named by "
                "the commit, or give it another name."
            )

    def missing(self, section: str, case: str, engines: Iterable[str]) -> list[str]:
        """Those of the engines that have no row."""
        return [engine for engine in engines if (section, case, engine) not in self.rows]

    def put(self, rows: Sequence[Row]) -> None:
        """Add rows, or replace those of the same engine and case; the file appears whole."""
        self.rows.update((key(row), row) for row in rows)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"machine": self.machine, "rows": list(self.rows.values())}, indent=1)
        fresh = self.path.with_suffix(".new")
        fresh.write_text(text + "\n")
        fresh.replace(self.path)


def key(row: Row) -> Key:
    """What a row is about."""
    return row["section"], row["case"], row["engine"]


def machine(device: str) -> dict[str, Any]:
    """What figures are measured on."""
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name() if device == "cuda" else _processor(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "commit": commit(),
        "measured": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    return found


def commit() -> str:
    """The commit that last changed what is measured, and whether it was changed since.

    A copy without a repository says it in the variable COMMIT.
    """
    said = os.environ.get("COMMIT")
    if said:
        return said
    changed = _git("status", "--porcelain", "--", *MEASURED)
    name = _git("log", "-1", "--format=%h", "--abbrev=7", "--", *MEASURED)
    if not name:
        raise OtherMachineError(
            "there is no repository here, and figures belong to a commit: say it, for example "
            "COMMIT=$(git log -1 --format=%h) python -m benchmarks."
        )
    return f"{name}-changed" if changed else name


def _git(*words: str) -> str:
    root = Path(__file__).parents[1]
    if which("git") is None:
        return ""
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=root)
    return done.stdout.strip()


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


# -- what was measured before ---------------------------------------------------------------


@dataclass(frozen=True)
class File:
    """A JSON of results."""

    path: Path
    machine: dict[str, Any]
    rows: list[Row]

    @classmethod
    def read(cls, path: Path) -> File:
        """What is in it."""
        held = json.loads(path.read_text())
        return cls(path, held["machine"], held["rows"])

    def section(self, name: str) -> list[Row]:
        """Its rows of one section."""
        return [row for row in self.rows if row["section"] == name]


def files(device: str) -> list[File]:
    """Those of a device, the newest last."""
    found = [File.read(path) for path in RESULTS.glob(f"{device}-*.json")]
    return sorted(found, key=lambda file: (file.machine["measured"], file.path.name))


def newest(device: str, section: str, before: int = 0) -> File | None:
    """The last file with rows of the section, or one that was measured so many files earlier."""
    having = [file for file in files(device) if file.section(section)]
    return having[-1 - before] if len(having) > before else None
