"""Ctrl-C in a training loop: the first one asks it to stop, the second one is an exception."""

from __future__ import annotations

import signal
import threading
from types import FrameType
from typing import Any


class Interrupt:
    """While entered, the first Ctrl-C asks the loop to stop and the second one is an exception.

    An exception at an arbitrary place could tear a release or the ledger apart.
    """

    def __init__(self) -> None:
        self.pending = False
        self._installed = False
        self._before: Any = None

    def __enter__(self) -> Interrupt:
        # Signals belong to the main thread; a process that ignores them keeps ignoring them.
        on_main = threading.current_thread() is threading.main_thread()
        if on_main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
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
