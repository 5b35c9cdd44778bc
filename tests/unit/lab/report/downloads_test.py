"""Files that a reader saves from a page."""

from __future__ import annotations

import csv
import gzip
import io
import json
from pathlib import Path

import pytest

from tests.support.experiments import made_rows, report_files, report_toy
from tests.support.pages import Reader, downloads


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("toy")
    return report_files(report_toy(folder), folder / "results" / "toy")


def test_rows_are_in_the_page(files: dict[str, str], tmp_path: Path) -> None:
    rows = made_rows(report_toy(tmp_path))
    found = downloads(Reader(files["report.html"]))
    assert set(found) == {"toy.csv", "toy.jsonl.gz"}
    lines = gzip.decompress(found["toy.jsonl.gz"]).decode().splitlines()
    assert [json.loads(line) for line in lines] == rows
    table = list(csv.DictReader(io.StringIO(found["toy.csv"].decode())))
    assert [line["hash"] for line in table] == [row["hash"] for row in rows]
    assert float(table[-1]["final_accuracy"]) == rows[-1]["final_accuracy"]
