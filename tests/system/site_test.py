"""The site: every page has its place, and the tutorials run as they stand."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
TUTORIALS = sorted((DOCS / "tutorials").glob("*.py"))
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if path.name != "__init__.py")


def test_every_page_has_a_place_in_the_navigation() -> None:
    placed = (ROOT / "mkdocs.yml").read_text()
    for page in sorted((*DOCS.glob("*.md"), *TUTORIALS)):
        assert page.relative_to(DOCS).as_posix() in placed, page
    assert "methods/" in placed


def test_tutorials_are_executed_whenever_the_site_is_built() -> None:
    """A cache knows of the tutorial's text, and not of the library or of the quick form."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "execute: true" in config and "cache: false" in config


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_says_how_far_its_guarantee_goes(path: Path) -> None:
    assert "**How far this" in path.read_text()


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_says_how_far_its_guarantee_goes(path: Path) -> None:
    assert "\nGuarantee: " in (ast.get_docstring(ast.parse(path.read_text())) or "")


@pytest.mark.slow
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_a_tutorial_runs_in_its_full_form(path: Path, tmp_path: Path) -> None:
    """`make docs` runs the quick form."""
    if path.stem == "lora":
        pytest.importorskip("peft", reason="needs the extra: pip install -e '.[hf]'")
    environment = {**os.environ, "MPLBACKEND": "agg"}
    environment.pop("TUTORIAL_EPOCHS", None)
    done = subprocess.run(
        [sys.executable, str(path)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
