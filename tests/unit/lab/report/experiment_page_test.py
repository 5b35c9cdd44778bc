"""Pages of experiments: complete, safe, readable by everyone."""

from __future__ import annotations

import csv
import io
import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.experiments import (
    HOSTILE,
    REPORT_FAIR,
    REPORT_TOY,
    forgetful,
    made_row,
    made_rows,
    only,
    report_files,
    report_toy,
    unprotected,
)
from tests.support.pages import check_page, downloads, order
from vestige.lab import catalogue
from vestige.lab.grid import Task


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("toy")
    return report_files(report_toy(folder), folder / "results" / "toy")


def test_a_page_is_complete_and_safe(files: dict[str, str]) -> None:
    assert set(files) == {
        "table.md",
        "table.json",
        "fair-accuracy.svg",
        "accuracy-by-epoch.svg",
        "accuracy-by-epsilon.svg",
        "epsilon-by-epoch.svg",
        "depth-by-interval.svg",
        "stages.svg",
        "runtime.svg",
        "final-accuracy.svg",
        "report.html",
    }
    reader = check_page(files["report.html"])
    order(
        files["report.html"],
        *("guarantee", "settings", "plots", "memory", "published", "fair", "rows"),
    )
    for words in (
        "epsilon 3.00 to 9.00 at delta 1e-05",
        "add or remove one record",
        "PLD",
        "no guarantee",
        "papers' figure (diagnostic)",
        "a diagnostic, not a guarantee",
        "test mode",
        "The paper says: Everything is better.",
        "What the paper leaves open",
        "Another is not run: nobody knows what it is.",
        "vestige reproduce toy vestige report results/toy",
        "Not drawn, since their epsilon is infinite: GeoDP.",
        "0.7100 ± 0.0100 [0.7000, 0.7200]",  # the paper's value beside ours
    ):
        assert words in reader.text, words
    assert "Unfinished" not in reader.text and "smoke" not in reader.text


def test_the_same_rows_give_the_same_bytes_whatever_is_configured(
    tmp_path: Path, files: dict[str, str]
) -> None:
    import matplotlib

    with matplotlib.rc_context({"font.size": 30, "lines.linewidth": 9, "svg.hashsalt": None}):
        again = report_files(report_toy(tmp_path), tmp_path / "elsewhere" / "results" / "toy")
    assert again == files


def test_intervals_by_hand(tmp_path: Path) -> None:
    # Three seeds 0.50, 0.60, 0.70: mean 0.6, std 0.1, t(0.975, 2) = 4.302653.
    def make(task: Task) -> dict[str, Any]:
        row = made_row(task)
        if task.label == "DP-SGD" and task.column == "published":
            row["final_accuracy"] = 0.5 + 0.1 * row["seed"]
        return row

    experiment = report_toy(tmp_path, REPORT_TOY).model_copy(
        update={"figures": ("final-accuracy",)}
    )
    reader = check_page(
        report_files(experiment, tmp_path / "r", made_rows(experiment, make))["report.html"]
    )
    half = 4.302653 * 0.1 / math.sqrt(3)
    assert f"0.6000 ± 0.1000 [{0.6 - half:.4f}, {0.6 + half:.4f}]" in reader.text


def test_whatever_a_label_says_is_shown_and_not_obeyed(tmp_path: Path) -> None:
    hostile = REPORT_TOY + REPORT_FAIR
    for old in ("A toy", "Everything is better.", "nobody knows", "Something, see"):
        hostile = hostile.replace(old, json.dumps(HOSTILE)[1:-1])
    hostile = hostile.replace('label = "SMA"', f"label = {json.dumps(HOSTILE)}")
    hostile = hostile.replace('label = "GeoDP"', 'label = "_hidden\\u0007"')
    hostile = hostile.replace('label = "Followed"', 'label = "=1+1"')

    def make(task: Task) -> dict[str, Any]:
        row = made_row(task)
        row["hardware"] = row["hardware"] | {"processor": HOSTILE}
        if row["diagnostics"]:
            row["diagnostics"]["groups"] = [HOSTILE, "_b", "</svg>"]
        return row

    experiment = report_toy(tmp_path, hostile)
    made = report_files(experiment, tmp_path / "toy", made_rows(experiment, make))
    reader = check_page(made["report.html"])
    assert "<script" not in made["report.html"]
    assert HOSTILE in reader.text and "_hidden" in reader.text
    assert "\x07" not in "".join(made.values())
    for name, content in made.items():
        if name.endswith(".svg"):
            assert "<script" not in content
            ET.fromstring(content)
    shown = "".join(ET.fromstring(made["accuracy-by-epoch.svg"]).itertext())
    assert HOSTILE in shown and "_hidden" in shown
    table = list(csv.DictReader(io.StringIO(downloads(reader)["toy.csv"].decode())))
    assert {row["label"] for row in table if "1+1" in row["label"]} == {"'=1+1"}


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (only(seed=0), "Unfinished: 3 of "),
        (only(label="DP-SGD"), "0/3"),
        (only(label="GeoDP"), "No guarantee"),
        (only(role="tuning"), "The fair column has not been run yet"),
        (only(column="published"), "The fair column has not been run yet"),
        (forgetful, "no run has recorded its memory"),
        (unprotected, "epsilon is infinite for every method"),
    ],
    ids=["one seed", "one method", "not private", "tuning", "published", "no memory", "infinite"],
)
def test_what_is_missing_is_said(make: Callable[[Task], Any], words: str, tmp_path: Path) -> None:
    experiment = report_toy(tmp_path)
    made = report_files(experiment, tmp_path / "toy", made_rows(experiment, make))
    assert words in check_page(made["report.html"]).text


def test_diverged_losses_and_smoke_runs(tmp_path: Path) -> None:
    def make(task: Task) -> dict[str, Any]:
        row = made_row(task) | {"final_loss": None}
        row["curve"] = row["curve"] | {"loss": [None] * len(row["curve"]["epoch"])}
        return row

    experiment = report_toy(tmp_path).quickened()
    experiment = experiment.model_copy(update={"figures": ("accuracy-by-epoch", "stages")})
    made = report_files(experiment, tmp_path / "toy", made_rows(experiment, make))
    assert "This is a smoke run" in check_page(made["report.html"]).text
    assert "vestige reproduce toy --quick" in made["report.html"]


QUICK = ["fo-tab3", "sma-fig4", "sma-tab3", "geodp-fig4", "geodp-mnist"]


@pytest.mark.parametrize("name", QUICK)
def test_experiments_of_the_papers(name: str, tmp_path: Path) -> None:
    experiment = catalogue.find(name).quickened()
    made = report_files(experiment, tmp_path / name)
    reader = check_page(made["report.html"])
    assert experiment.title in reader.text
    assert len(made) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(catalogue.names()) - set(QUICK)))
def test_every_experiment_of_the_papers(name: str, tmp_path: Path) -> None:
    test_experiments_of_the_papers(name, tmp_path)
