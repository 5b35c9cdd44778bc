"""The statement as a page."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.training import tiny
from vestige.errors import ConfigError
from vestige.statement import html, read
from vestige.train.training import train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_page_says_what_the_statement_says_and_obeys_nothing_in_it() -> None:
    train(tiny(out=Path("run")))
    stated = read(Path("run"))
    stated["run"]["dataset"] = "<script>alert(1)</script> [x](http://e.org) ![](http://e.org/a)"
    page = html(stated)
    assert "<h1>Privacy statement</h1>" in page and "<table>" in page
    assert "<script" not in page and '="http' not in page and "<img" not in page
    assert page.count("<a ") == 1 and 'href="report.html"' in page
    assert "What is usual" in page and "thead:not(" in page  # tables without names of columns


def test_without_its_reader_it_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "markdown_it", None)
    with pytest.raises(ConfigError, match=r"markdown-it-py.*pip install 'vestige-dp\[cli\]'"):
        html({})
