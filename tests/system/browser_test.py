"""Pages in a real browser: Chromium loads them, and nothing is missing, broken or overflowing.

Skipped where no Chromium is installed (Debian: apt-get install chromium). It is spoken to over two
pipes, so that nothing but the browser is needed. VESTIGE_SCREENSHOTS names a folder for screenshots
that people can look at.
"""

from __future__ import annotations

import base64
import fcntl
import io
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.experiments import HOSTILE, REPORT_FAIR, REPORT_TOY, made_rows, report_toy
from tests.support.program import run
from vestige.lab import report

_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next((found for name in _NAMES if (found := shutil.which(name))), None)
SECONDS = 90  # of patience: a busy machine starts a browser slowly

pytestmark = pytest.mark.skipif(
    CHROMIUM is None, reason="no Chromium is installed, so no page was looked at in a browser"
)
Values = dict[str, Any]


class Browser:
    """A headless Chromium without a network, spoken to by the DevTools protocol over pipes."""

    def __init__(self, profile: Path) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        # Chromium reads from descriptor 3 and writes to 4; ours must not be in their way.
        ends = [fcntl.fcntl(fd, fcntl.F_DUPFD, 10) for fd in (to_read, to_write)]
        os.close(to_read)
        os.close(to_write)

        def place() -> None:
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        assert CHROMIUM is not None
        self._process = subprocess.Popen(
            [
                CHROMIUM,
                "--headless",
                "--remote-debugging-pipe",
                f"--user-data-dir={profile}",
                "--no-first-run",
                "--disable-gpu",
                "--disable-dev-shm-usage",
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
                "--hide-scrollbars",
                "--force-color-profile=srgb",
                "--host-resolver-rules=MAP * ~NOTFOUND",
                *(["--no-sandbox"] if os.geteuid() == 0 else []),
            ],
            pass_fds=(3, 4),
            preexec_fn=place,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in ends:
            os.close(end)
        self._numbers, self._rest = itertools.count(1), b""
        self.events: list[Values] = []
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Log", "Runtime", "Network"):
            self.ask(f"{domain}.enable")

    def close(self) -> None:
        """End the browser, kindly at first."""
        os.close(self._write)
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._read)

    def ask(self, method: str, **parameters: Any) -> Values:
        """Send a command and wait for its answer; events on the way are kept."""
        number = next(self._numbers)
        message: Values = {"id": number, "method": method, "params": parameters}
        if getattr(self, "_session", ""):
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            self.events.append(answer)

    def wait(self, method: str) -> None:
        """Wait for an event, which may have come already."""
        while not any(event.get("method") == method for event in self.events):
            self.events.append(self._next())

    def _next(self) -> Values:
        deadline = time.monotonic() + SECONDS
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._read], [], [], deadline - time.monotonic())
            assert ready, f"Chromium has said nothing for {SECONDS} seconds"
            piece = os.read(self._read, 2**20)
            assert piece, "Chromium has ended"
            self._rest += piece
        message, _, self._rest = self._rest.partition(b"\0")
        return dict(json.loads(message))

    def load(self, page: Path) -> None:
        """Load a page from the disk, and forget what was before."""
        self.events.clear()
        self.ask("Page.navigate", url=page.absolute().as_uri())
        self.wait("Page.loadEventFired")

    def resize(self, width: int, height: int) -> None:
        """The size of the window in CSS pixels."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )

    def prefer(self, scheme: str, medium: str = "screen") -> None:
        """What the reader prefers: light or dark, on a screen or in print."""
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.ask("Emulation.setEmulatedMedia", media=medium, features=features)

    def evaluate(self, script: str) -> Any:
        """The value of an expression, in the page."""
        found = self.ask("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def screenshot(self, path: Path | None = None, whole: bool = False) -> Any:
        """The page as an array of colours; also as a file, where one is named."""
        from matplotlib.image import imread

        found = self.ask("Page.captureScreenshot", captureBeyondViewport=whole)
        data = base64.b64decode(found["data"])
        if path is not None:
            path.write_bytes(data)
        return imread(io.BytesIO(data))[..., :3]

    def complaints(self) -> list[str]:
        """Errors and warnings on the console, failed requests, and any that left the disk."""
        found = []
        for event in self.events:
            facts = event.get("params", {})
            name = event.get("method")
            if name == "Log.entryAdded" and facts["entry"]["level"] in ("error", "warning"):
                found.append(facts["entry"]["text"])
            elif name == "Runtime.exceptionThrown":
                found.append(str(facts["exceptionDetails"].get("text")))
            elif name == "Runtime.consoleAPICalled" and facts["type"] in ("error", "warning"):
                found.append(str(facts["args"]))
            elif name == "Network.requestWillBeSent":
                address = facts["request"]["url"]
                if not address.startswith(("file:", "data:", "about:")):
                    found.append(f"a request to {address}")
            elif name == "Network.loadingFailed":
                found.append(f"a request that failed: {facts.get('errorText')}")
        return found

    def broken_images(self) -> int:
        """Images that did not load, and drawings that take no room."""
        return int(
            self.evaluate(
                "[...document.images].filter(i => !i.complete || !i.naturalWidth || "
                "i.getBoundingClientRect().width < 150 || i.getBoundingClientRect().height < 50)"
                ".length"
            )
        )


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    found = Browser(tmp_path_factory.mktemp("profile"))
    yield found
    found.close()


@pytest.fixture(scope="module")
def shots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go."""
    named = os.environ.get("VESTIGE_SCREENSHOTS")
    folder = Path(named) if named else tmp_path_factory.mktemp("screenshots")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A page of an experiment, one with hostile labels, and one of a run."""
    root = tmp_path_factory.mktemp("pages")
    made = {}
    hostile = (REPORT_TOY + REPORT_FAIR).replace('label = "SMA"', f"label = {json.dumps(HOSTILE)}")
    for name, content in (("experiment", REPORT_TOY + REPORT_FAIR), ("hostile", hostile)):
        experiment = report_toy(root / name, content)
        made[name] = report.write(experiment, made_rows(experiment), root / name / "toy")[-1]
    folder = root / "runs" / "sma"
    arguments = "train --method sma --epochs 2 --noise-seed 1 --json --out"
    assert run(arguments, str(folder)).exit_code == 0
    made["run"] = report.write_run(folder)[-1]
    return made


def not_blank(image: Any) -> None:
    """Many colours, and none of them everywhere."""
    pixels = (image[::2, ::2] * 255).astype(np.int64) @ np.array([2**16, 2**8, 1])
    _, counts = np.unique(pixels, return_counts=True)
    assert len(counts) > 50
    assert 0.2 < counts.max() / counts.sum() < 0.985


NAMES = ("experiment", "hostile", "run")


@pytest.mark.parametrize("name", NAMES)
def test_a_page_loads_without_a_complaint(
    name: str, browser: Browser, pages: dict[str, Path], shots: Path
) -> None:
    browser.resize(1280, 1000)
    browser.prefer("light")
    browser.load(pages[name])
    image = browser.screenshot(shots / f"{name}-light.png", whole=True)
    not_blank(image)
    assert browser.complaints() == []
    assert browser.broken_images() == 0
    assert browser.evaluate("document.querySelectorAll('img.plot').length") >= 3
    assert browser.evaluate("document.querySelectorAll('script').length") == 0
    assert image.shape[0] > 2000  # all of it, not the first screen
    # What is folded has its content too.
    browser.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
    assert browser.broken_images() == 0 and browser.complaints() == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_without_scripting_is_the_same(
    name: str, browser: Browser, pages: dict[str, Path], shots: Path
) -> None:
    browser.resize(1000, 1400)
    browser.prefer("light")
    browser.load(pages[name])
    scripted = browser.screenshot()
    browser.ask("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.load(pages[name])
        image = browser.screenshot(shots / f"{name}-without-scripting.png")
        assert browser.complaints() == []
    finally:
        browser.ask("Emulation.setScriptExecutionDisabled", value=False)
    not_blank(image)
    assert np.array_equal(scripted, image)


@pytest.mark.parametrize("name", NAMES)
def test_a_page_on_a_narrow_dark_screen_and_on_paper(
    name: str, browser: Browser, pages: dict[str, Path], shots: Path
) -> None:
    browser.resize(375, 800)
    browser.prefer("dark")
    browser.load(pages[name])
    dark = browser.screenshot(shots / f"{name}-dark-narrow.png", whole=True)
    not_blank(dark)
    assert dark.mean() < 0.25
    # Tables scroll inside their frames, the page itself does not.
    assert browser.evaluate("document.documentElement.scrollWidth") <= 375
    browser.prefer("light")
    light = browser.screenshot(shots / f"{name}-light-narrow.png", whole=True)
    assert light.mean() > 0.8
    # Whoever prefers the dark still prints on white.
    browser.resize(800, 1100)
    browser.prefer("dark", medium="print")
    printed = browser.screenshot(shots / f"{name}-print.png", whole=True)
    not_blank(printed)
    assert printed.mean() > 0.8
    browser.prefer("light")
    assert browser.complaints() == []


def test_rows_can_be_saved_from_the_page(
    browser: Browser, pages: dict[str, Path], tmp_path: Path
) -> None:
    browser.load(pages["experiment"])
    browser.ask("Page.setDownloadBehavior", behavior="allow", downloadPath=str(tmp_path))
    browser.evaluate("document.querySelector('a[download=\"toy.csv\"]').click()")
    deadline = time.monotonic() + SECONDS
    while not (tmp_path / "toy.csv").is_file():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert (tmp_path / "toy.csv").read_text().startswith("hash,column,role,label")
    assert browser.complaints() == []


def test_the_browser_would_have_noticed(browser: Browser, tmp_path: Path) -> None:
    """A page with a missing image, an error and a request to the network is not let through."""
    page = tmp_path / "bad.html"
    page.write_text(
        "<!DOCTYPE html><title>bad</title><img src='missing.png' alt='nothing'>"
        "<img src='http://example.com/x.png' alt='far'><script>throw new Error('oh')</script>"
        "<img src='data:image/svg+xml,<svg/>' alt='small' width='10' height='10'>"
    )
    browser.load(page)
    said = " ".join(browser.complaints())
    assert "a request to http://example.com/x.png" in said
    assert "Uncaught" in said and "ERR_FILE_NOT_FOUND" in said
    assert browser.broken_images() == 3
    page.write_text("<!DOCTYPE html><title>blank</title>")
    browser.load(page)
    with pytest.raises(AssertionError):
        not_blank(browser.screenshot())
