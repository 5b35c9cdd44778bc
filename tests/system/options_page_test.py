"""docs/options.md says what the commands say."""

from __future__ import annotations

import runpy
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_of_options_is_up_to_date() -> None:
    page = runpy.run_path(str(DOCS / "options.py"))["page"]()
    assert page == (DOCS / "options.md").read_text(), "python docs/options.py > docs/options.md"
    assert max(map(len, page.splitlines())) <= 100
