"""Smoke runs of the papers' experiments, from the command line to their tables."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.program import run, run_json
from vestige.lab import catalogue
from vestige.train.recipes.pretraining import Pretraining

QUICK = ("fo-fig8", "sma-tab3", "fo-equal", "geodp-fig4")  # each column, memory, no training


needs_data = pytest.mark.skipif(
    not (Path(os.environ.get("VESTIGE_DATA", "")) / "cifar10.npz").is_file()
    or not os.environ.get("VESTIGE_DATA"),
    reason="the benchmark sets are not here: name their folder in VESTIGE_DATA",
)


@pytest.fixture(scope="module")
def quick_results(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shared, as rows are."""
    yield tmp_path_factory.mktemp("quick")


def smoke(name: str, out: Path) -> None:
    report = run_json(f"reproduce {name} --quick --out {out}")
    assert report["failures"] == []
    assert report["finished"] == report["total"] > 0
    assert report["smoke_run"]
    assert "smoke run" in (out / "quick" / name / "table.md").read_text()
    numbers = json.loads((out / "quick" / name / "table.json").read_text())
    cells = [*numbers.get("published", []), *numbers.get("fair", [])]
    lines = [line for cell in cells for line in cell["lines"] if "reason" not in line]
    assert all(line["count"] == line["expected"] for line in lines)
    assert all(len(p["points"]) == p["expected"] for p in numbers.get("panels", []))
    assert cells or numbers["panels"]
    before = {path: path.read_bytes() for path in (out / "quick" / name).glob("table.*")}
    assert run("report", str(out / "quick" / name)).exit_code == 0
    assert {path: path.read_bytes() for path in before} == before


@needs_data
@pytest.mark.parametrize("name", QUICK)
def test_quick(name: str, quick_results: Path) -> None:
    smoke(name, quick_results)


@needs_data
@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in catalogue.names() if n not in (*QUICK, "prior")])
def test_quick_of_the_others(name: str, quick_results: Path) -> None:
    smoke(name, quick_results)


@needs_data
@pytest.mark.slow
def test_quick_of_features_that_were_learned(
    tmp_path: Path, quick_results: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = Path(os.environ["VESTIGE_DATA"]) / "cifar10.npz"
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path))
    (tmp_path / "cifar10.npz").symlink_to(data)
    Pretraining(file=tmp_path / "prior.pt", steps=1, batch=2, side=8).run()
    smoke("prior", quick_results)
