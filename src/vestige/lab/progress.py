"""What a command shows while rows are made: a bar with rich on a terminal, or else lines.

rich is optional: the runner has to work on a machine that has torch and little else.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.progress import ProgressColumn

# From this width on a bar has room for the elapsed time beside what is left.
WIDE = 120


class Display:
    """Plain lines on stderr: what was there, and what was finished; nothing if it is quiet."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet

    def begin(self, finished: int, total: int) -> None:
        """At the start: what is there already."""
        self._line(f"{finished} of {total} rows are there, {total - finished} are left")

    def show(self, finished: int, total: int, now: str = "") -> None:
        """The state of things, and what is being made; called often."""

    def done(self, name: str) -> None:
        """A row of this command is finished."""
        self._line(f"done: {name}")

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
        super().__init__(quiet=True)
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        self._bar = progress.Progress(
            progress.TextColumn("rows"),
            *bar_columns(console.width),
            progress.TextColumn("{task.description}", markup=False),
            console=console,
        )
        self._task: Any = None

    def begin(self, finished: int, total: int) -> None:
        """At the start: what is there already."""
        self._bar.start()
        self._task = self._bar.add_task("starting", total=total, completed=finished)

    def show(self, finished: int, total: int, now: str = "") -> None:
        """The state of things, and what is being made; called often."""
        self._bar.update(self._task, completed=finished, total=total, description=now or None)

    def say(self, message: str) -> None:
        """Something that the user should read, above the bar."""
        self._bar.console.print(f"vestige: {message}", markup=False, highlight=False)

    def end(self) -> None:
        """At the end, in whatever way it came."""
        self._bar.stop()


def bar_columns(width: int) -> tuple[ProgressColumn, ...]:
    """The bar, how much is done, and the time, for a terminal of that width.

    What is left is shown once it can be told; until then, and where there is room, what has passed.
    """
    from rich import progress
    from rich.text import Text

    class Time(progress.ProgressColumn):
        def render(self, task: progress.Task) -> Text:
            passed = task.finished_time if task.finished else task.elapsed
            left = None if task.finished else task.time_remaining
            parts = [] if left is None else [f"{clock(left)} left"]
            if left is None or width >= WIDE:
                parts.insert(0, f"{clock(passed or 0)} passed")
            return Text(", ".join(parts), style="progress.elapsed")

    bar = progress.BarColumn(bar_width=24 if width >= WIDE else 8)
    return bar, progress.MofNCompleteColumn(), Time()


def clock(seconds: float) -> str:
    """Hours, minutes and seconds."""
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}"


def best_display(quiet: bool = False) -> Display:
    """A bar where there is a terminal and rich; lines otherwise; nothing if it shall be quiet."""
    bar = importlib.util.find_spec("rich") is not None and sys.stderr.isatty()
    return Bar() if bar and not quiet else Display(quiet)
