"""What every test of the suite needs."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest


def pytest_configure() -> None:
    """Ctrl-C as in a program that was started from a terminal.

    A shell hands SIGINT to what it runs in the background as ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in an empty folder of its own, without the machine's data and settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VESTIGE_DATA", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # `train` sets it: undone after the test
