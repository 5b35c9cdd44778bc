"""What every test of the suite needs."""

from __future__ import annotations

import gc
import signal
import sys
import tomllib
from collections import Counter
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

SLOW = Path(__file__).parent / "slow.toml"
# No test fails because the machine is busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")


def pytest_configure() -> None:
    """Ctrl-C as in a program that was started from a terminal.

    A shell hands SIGINT to what it runs in the background as ignored, and children inherit that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow what slow.toml names, but for the cases that it keeps."""
    entries = {entry["tests"]: entry for entry in tomllib.loads(SLOW.read_text())["slow"]}
    for item in items:
        test, _, rest = item.nodeid.partition("[")
        entry, case = entries.get(test), rest.removesuffix("]")
        if entry is None or case in entry.get("keep", []):
            continue
        if any(fnmatchcase(case, pattern) for pattern in entry.get("cases", ["*"])):
            item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of every later round of the garbage collector."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def no_modes_left() -> Iterator[None]:
    """No test leaves a mode on torch's stack, where it would change what later tests do.

    The watch of a loop that broke off is no such mode: it would go with the next loop.
    """
    yield
    torch = sys.modules.get("torch")
    if torch is None:
        return
    count = torch._C._len_torch_function_stack()
    left = [torch.overrides._pop_mode() for _ in range(count)]
    left = [mode for mode in left if type(mode).__name__ != "LossWatch"]
    assert not left, "modes that were on torch's stack after the test"


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs in an empty folder of its own, without the machine's data and settings."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("VESTIGE_DATA", raising=False)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # `train` sets it: undone after the test


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the seconds of every room, since the time of the suite is a budget like its lines."""
    rooms: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                path = Path(report.nodeid.partition("::")[0])
                rooms["/".join(path.parts[1 : 3 if path.parts[1] == "unit" else 2])] += round(
                    report.duration * 1000
                )
    if len(rooms) > 1:
        terminalreporter.section("seconds by room, all workers together")
        for room, milliseconds in rooms.most_common():
            terminalreporter.write_line(f"{milliseconds / 1000:8.1f}  {room}")
