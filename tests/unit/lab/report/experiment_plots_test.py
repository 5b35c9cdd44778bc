"""The plots of an experiment as files of their own."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.support.experiments import REPORT_TOY, report_files, report_toy


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("toy")
    return report_files(report_toy(folder), folder / "results" / "toy")


def test_plot_files_are_well_formed_and_need_nothing(files: dict[str, str]) -> None:
    for name, content in files.items():
        if name.endswith(".svg"):
            root = ET.fromstring(content)
            assert root.tag.endswith("svg") and "viewBox" in root.attrib
            described = [
                part.text for part in root.iter() if part.tag.endswith(("title", "description"))
            ]
            assert len(described) >= 2 and all(described)
            assert "<image" not in content and "dc:date" not in content
            # Namespaces and the document type are names, not addresses to be loaded.
            addresses = set(re.findall(r'href="([^"]*)"', content))
            assert all(address.startswith("#") for address in addresses)
            assert "SMA" in content or name in ("stages.svg", "fair-accuracy.svg")


def test_replacing_an_experiment_keeps_its_plots(tmp_path: Path) -> None:
    """An experiment that names no figure still gets one."""
    experiment = report_toy(tmp_path, REPORT_TOY).model_copy(update={"figures": ()})
    assert set(report_files(experiment, tmp_path / "toy")) == {
        "table.md",
        "table.json",
        "accuracy-by-epoch.svg",
        "report.html",
    }
