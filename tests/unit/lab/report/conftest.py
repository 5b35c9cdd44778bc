"""Run folders that are reported."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from tests.support.program import run


@pytest.fixture(scope="package")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two epochs on digits: with memory, and with a method that is not private."""
    root = tmp_path_factory.mktemp("runs")
    more = "--epochs 2 --noise-seed 271828182 --json --out"
    assert run(f"train --method sma --set alpha=0.6 {more}", str(root / "sma")).exit_code == 0
    assert run(f"train --method geodp --train-loss {more}", str(root / "geodp")).exit_code == 0
    return root


@pytest.fixture
def folder(runs: Path, tmp_path: Path) -> Path:
    """A copy of a run folder that may be damaged."""
    return Path(shutil.copytree(runs / "sma", tmp_path / "runs" / "sma"))
