"""What a newcomer has: the wheel in an empty folder, and the page that leads through it."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from a copy of the source and installed into a folder of its own."""
    pytest.importorskip("setuptools", reason="builds a wheel: pip install setuptools")
    source, target = (tmp_path_factory.mktemp(name) for name in ("source", "site"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("*.egg-info"))
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    wheel = [*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", str(source), str(source)]
    subprocess.run(wheel, check=True, capture_output=True, text=True)
    (made,) = source.glob("*.whl")
    command = [*pip, "install", "--no-deps", "--target", str(target), str(made)]
    subprocess.run(command, check=True, capture_output=True, text=True)
    return target


def run(site: Path, folder: Path, command: str) -> str:
    """A line of a shell, with the wheel's `vestige` and Python; what it prints."""
    environment = {name: value for name, value in os.environ.items() if name != "VESTIGE_DATA"}
    environment |= {
        "PYTHONPATH": str(site),
        "PATH": os.pathsep.join([str(site / "bin"), str(Path(sys.executable).parent), os.defpath]),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command, shell=True, cwd=folder, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def blocks(page: str) -> list[str]:
    """The indented blocks of a page, one after the other, with their lines joined."""
    found = re.findall(r"(?:^    .*\n)+", page, re.M)
    return [re.sub(r"^    ", "", block, flags=re.M).replace("\\\n", " ") for block in found]


def test_the_demo_runs_from_the_wheel(site: Path, tmp_path: Path) -> None:
    found = run(site, tmp_path, "python -c 'import vestige; print(vestige.__file__)'")
    assert Path(found.strip()).is_relative_to(site)
    shown = json.loads(run(site, tmp_path, "vestige demo --epochs 1 --out d --json"))
    assert [one["method"] for one in shown["runs"]] == ["dp-sgd", "fo", "sma"]
    for name in ("dp-sgd", "fo", "sma"):
        assert (tmp_path / "d" / name / "report.html").is_file()
        assert (tmp_path / "d" / name / "statement.html").is_file()


def test_the_page_for_newcomers_runs_as_printed_from_the_wheel(site: Path, tmp_path: Path) -> None:
    page = (ROOT / "docs" / "start.md").read_text()
    make, toml = (re.findall(rf"```{kind}\n(.*?)```", page, re.S)[0] for kind in ("python", "toml"))
    (tmp_path / "make.py").write_text(make)
    run(site, tmp_path, "python make.py")
    lines = (tmp_path / "patients.csv").read_text().splitlines()
    (tmp_path / "new_patients.csv").write_text("\n".join(lines[:21]) + "\n")
    done = []
    for block in blocks(page):
        if block.startswith("import vestige"):
            (tmp_path / "use.py").write_text(block)
            run(site, tmp_path, "python use.py")
        for line in block.splitlines():
            if line.startswith(("vestige ", "ssh-keygen ")):
                done.append(line.split()[1])
                run(site, tmp_path, line)
            if line.startswith("vestige schema"):
                schema = tmp_path / "patients.schema.toml"
                head = schema.read_text().partition("[columns")[0]
                schema.write_text(f"{head}{toml}")
    wanted = "schema suggest train predict statement -q statement statement export".split()
    assert done == wanted
    assert len((tmp_path / "predictions.csv").read_text().splitlines()) == 21
    assert (tmp_path / "first" / "model.pt2").is_file()
