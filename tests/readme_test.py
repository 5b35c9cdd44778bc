"""The README's example runs as printed, and the documents name things that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def example() -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)


def test_the_example_runs_as_printed_and_is_short(tmp_path):
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 15
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    epsilon = float(re.fullmatch(r"\(([\d.]+), 1e-5\)-.* after 150 releases\n", done.stdout)[1])
    assert 4 < epsilon < 6


def test_the_readme_shows_the_two_commands():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme and f"\n{target}: " in makefile


def test_every_pitfall_names_a_test_that_exists_or_a_reason():
    rows = [
        line.split("|")
        for line in (ROOT / "docs" / "pitfalls.md").read_text().splitlines()
        if re.match(r"\| *\d+ ", line)
    ]
    assert [int(re.search(r"\d+", row[1])[0]) for row in rows] == list(range(1, 42))
    for row in rows:
        named = re.findall(r"(\w+_test)(?:\.py)?::(\w+)", row[3])
        for file, name in named:
            assert f"def {name}" in (ROOT / "tests" / f"{file}.py").read_text(), (file, name)
        assert named or len(row[3]) > 20, row


def test_every_relative_link_of_the_documents_leads_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)
