"""What a command shows while rows are made: a bar with rich on a terminal, or else lines.

rich is optional: the runner has to work on a machine that has torch and little else.
"""

from __future__ import annotations

import importlib.util
import sys
import time
from typing import Any


class Display:
    """Plain lines on stderr: what was finished, how many are left, and how long that may take."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._first, self._began = 0, time.monotonic()

    def begin(self, finished: int, total: int) -> None:
        """At the start: what is there already."""
        self._first, self._began = finished, time.monotonic()
        self._line(f"{finished} of {total} rows are there, {total - finished} are left")

    def show(self, finished: int, total: int) -> None:
        """The state of things; called often."""

    def started(self, name: str) -> None:
        """A row was begun."""

    def finished(self, name: str) -> None:
        """A row of this command is done."""
        self._line(f"done: {name}")

    def watch(self, epoch: int, epochs: int) -> None:
        """An epoch of the row at hand is done."""

    def say(self, message: str) -> None:
        """Something that the user should read."""
        print(f"vestige: {message}", file=sys.stderr, flush=True)

    def end(self) -> None:
        """At the end, in whatever way it came."""

    def _line(self, text: str) -> None:
        if not self._quiet:
            print(text, file=sys.stderr, flush=True)


class Bar(Display):
    """A progress bar over the rows, with the row at hand and the time that is probably left."""

    def __init__(self) -> None:
        super().__init__()
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._bar: Any = Progress(
            TextColumn("rows"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            TextColumn("{task.description}", markup=False),
            console=Console(stderr=True),
        )
        self._task: Any = None
        self._name = ""

    def begin(self, finished: int, total: int) -> None:
        """At the start: what is there already."""
        self._bar.start()
        self._task = self._bar.add_task("starting", total=total, completed=finished)

    def show(self, finished: int, total: int) -> None:
        """The state of things; called often."""
        self._bar.update(self._task, completed=finished, total=total)

    def started(self, name: str) -> None:
        """A row was begun."""
        self._name = name
        self._bar.update(self._task, description=name)

    def finished(self, name: str) -> None:
        """A row of this command is done."""

    def watch(self, epoch: int, epochs: int) -> None:
        """An epoch of the row at hand is done."""
        self._bar.update(self._task, description=f"{self._name} (epoch {epoch}/{epochs})")

    def say(self, message: str) -> None:
        """Something that the user should read, above the bar."""
        self._bar.console.print(f"vestige: {message}", markup=False, highlight=False)

    def end(self) -> None:
        """At the end, in whatever way it came."""
        self._bar.stop()


def best_display(quiet: bool = False) -> Display:
    """A bar where there is a terminal and rich; lines otherwise; nothing if it shall be quiet."""
    if quiet:
        return Display(quiet=True)
    has_rich = importlib.util.find_spec("rich") is not None
    return Bar() if has_rich and sys.stderr.isatty() else Display()
