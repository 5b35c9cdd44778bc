"""Ctrl-C while something is trained: the first one asks, and is answered at once."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType
from typing import Any

ANSWER = "stopping after this step; Ctrl-C again stops now"
_STDERR = 2


class Interrupt:
    """While entered, the first Ctrl-C asks the loop to stop and the second one is an exception.

    An exception at an arbitrary place could tear a release or the ledger apart. The first one is
    answered with a line on stderr, since a step may take long. Inside another `Interrupt`, `with`
    gives that one: whoever runs several loops is asked once for all of them.
    """

    def __init__(self, answer: str = ANSWER) -> None:
        self.pending = False
        self._answer = answer
        self._installed = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        # Signals belong to the main thread; a process that ignores them keeps ignoring them.
        if threading.current_thread() is not threading.main_thread():
            return self
        handler = signal.getsignal(signal.SIGINT)
        around = getattr(handler, "__self__", None)
        if isinstance(around, Interrupt):
            return around
        if handler is signal.default_int_handler:
            self._before = signal.signal(signal.SIGINT, self._handle)
            self._installed = True
        return self

    def __exit__(self, *_: object) -> None:
        if self._installed:
            signal.signal(signal.SIGINT, self._before)

    def _handle(self, _signal: int, _frame: FrameType | None) -> None:
        if self.pending:
            raise KeyboardInterrupt
        self.pending = True
        # Past Python's own buffer, which may be in the middle of a line; over a progress bar.
        start, end = ("\r\x1b[2K", "\n") if os.isatty(_STDERR) else ("", "\n")
        with contextlib.suppress(OSError):
            os.write(_STDERR, f"{start}vestige: {self._answer}{end}".encode())
