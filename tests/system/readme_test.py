"""The README's example runs as printed, and the documents name things that exist."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def example() -> str:
    return re.search(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL).group(1)


def test_the_example_runs_as_printed_and_is_short(tmp_path):
    code = example()
    assert len([line for line in code.splitlines() if line.strip()]) <= 20
    assert ";" not in code and max(map(len, code.splitlines())) <= 100
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    epsilon = float(re.fullmatch(r"epsilon ([\d.]+) after 150 releases\n", done.stdout)[1])
    assert 4 < epsilon < 6


def test_the_readme_shows_the_two_commands():
    readme, makefile = (ROOT / "README.md").read_text(), (ROOT / "Makefile").read_text()
    for target in ("demo", "test"):
        assert f"make {target}" in readme and f"\n{target}: " in makefile


def test_every_relative_link_of_the_documents_leads_somewhere():
    for document in [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text()):
            assert (document.parent / target).exists(), (document.name, target)


def test_the_filter_table_of_fo_is_what_its_code_prints():
    text = (ROOT / "docs" / "methods" / "fo.md").read_text()
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    printed = [[float(x) for x in line.split()] for line in done.stdout.splitlines()]
    rows = re.findall(r"^\| ([\d.]+) \| 1 \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", text, re.M)
    shown = [[float(x) for x in row] for row in rows]
    assert len(shown) == len(printed) == 6
    for (beta, total, power, step, delay), (a, b, c, d) in zip(printed, shown, strict=True):
        assert (a, round(total, 6)) == (beta, 1.0)
        assert abs(power - b) < 0.0051 and abs(step - c) < 0.00051 and abs(delay - d) < 0.0051


def test_the_epsilons_of_the_method_pages_are_those_of_the_accountant():
    from vestige.cli.budget import costs

    fo = (ROOT / "docs" / "methods" / "fo.md").read_text()
    shown = [float(x) for x in re.search(r"\| epsilon, PLD \|(.*)\|", fo)[1].split("|")]
    for beta, value in zip((1, 0.95, 0.9, 0.8, 0.65), shown, strict=True):
        found = costs(0.04, 6250, 1e-5, noise_multiplier=1.1, beta=beta)["epsilon"]["pld"]
        assert found <= value + 1e-9 and value - found < 0.011
    sma = (ROOT / "docs" / "methods" / "sma.md").read_text()
    shown = [float(x) for x in re.search(r"\| epsilon \(PLD\) \|(.*)\|", sma)[1].split("|")]
    for groups, value in zip((3, 6, 21), shown, strict=True):
        report = costs(
            0.04, 1250, 1e-5, group_noise_multiplier=1.1, groups=groups, beta=0.95
        )["epsilon"]["pld"]  # fmt: skip
        assert report <= value + 1e-9 and value - report < 0.011


def test_the_table_of_the_audit_page_is_the_one_that_the_command_wrote():
    written = (ROOT / "results" / "audit" / "table.md").read_text()
    page = (ROOT / "docs" / "audit.md").read_text()
    rows = [line for line in written.splitlines() if line.startswith("|")]
    assert len(rows) > 30
    assert [row for row in rows if row not in page] == []
