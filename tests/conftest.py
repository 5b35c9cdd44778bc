"""What every test of the suite needs."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Ctrl-C as in a program that was started from a terminal.

    A shell hands SIGINT to what it runs in the background as ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
