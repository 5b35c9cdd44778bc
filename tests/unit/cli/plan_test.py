"""The command plan."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.support.program import run, run_json
from vestige.methods import planning
from vestige.methods.planning import Comparison, Request

pytestmark = pytest.mark.usefixtures("empty_folder")

SMALL = "plan --dataset-size 1000 --lot 50 --epochs 3 --epsilon 4 --accountant rdp"


@cache
def small(**changes: Any) -> Comparison:
    given: dict[str, Any] = {"dataset_size": 1000, "lot": 50, "epochs": 3, "epsilon": 4.0}
    return planning.compare(Request(**given | {"accountant": "rdp"} | changes))


def test_the_command_prints_the_table_and_the_words() -> None:
    result = run(SMALL)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "1,000 records, lot 50, 3 epochs (60 steps), epsilon 4, delta 1e-05 (rdp)" in (
        result.stdout
    )
    rows = [line.split() for line in result.stdout.splitlines()]
    assert ["dp-sgd", "yes", "0.05"] in [row[:3] for row in rows]
    for bands in (2, 4, 8, 16):
        (row,) = [r for r in rows if r[:1] == ["fractional"] and r[2] == str(bands)]
        best = min((r for r in small().fractional if r.bands == bands), key=lambda r: r.ratio)
        assert (row[1], row[8]) == (f"{best.order:g},", f"{best.ratio:.3f}")
    assert "Use fractional noise" in result.stdout
    assert not list(Path().iterdir())


def test_the_table_fits_into_eighty_characters() -> None:
    text = run(
        "plan --dataset-size 60000 --lot 64 --epochs 9 --epsilon 1 --accountant rdp",
        FORCE_COLOR="1",
        NO_COLOR="1",
        COLUMNS="80",
    ).stdout
    assert "…" not in text
    assert "fractional 0.8, 64" in text


def test_progress_goes_to_stderr_on_a_terminal() -> None:
    result = run(SMALL, "--json", FORCE_COLOR="1", COLUMNS="100")
    assert json.loads(result.stdout)["steps"] == 60
    assert "calibrating the noise" in result.stderr


def test_json() -> None:
    report = run_json(SMALL, "--max-memory", "7", "--delta", "1e-6")
    expected = small(max_memory=7, delta=1e-6)
    assert report == json.loads(json.dumps(expected.as_dict()))
    assert list(report) == [
        *("dataset_size", "lot", "epochs", "epsilon", "delta", "accountant", "max_memory"),
        *("steps", "guarantee", "rows", "recommendation"),
    ]
    assert {tuple(row) for row in report["rows"]} == {
        (
            *("method", "settings", "order", "bands", "sample_rate", "events"),
            *("noise_multiplier", "epsilon", "prefix_error", "ratio", "step_noise", "memory"),
            *("delay", "prefix_max", "step_max", "amplified", "adjacency"),
        )
    }
    chosen = report["recommendation"]
    assert set(chosen) == {
        *(
            "method",
            "settings",
            "ratio",
            "gain",
            "memory",
            "available",
            "best_fractional",
            "best_correlated",
        ),
        "min_gain",
    }
    assert chosen["gain"] == 1 - chosen["ratio"]
    assert chosen["best_fractional"] in report["rows"]
    assert chosen["settings"] == chosen["best_fractional"]["settings"]
    nothing = run_json(SMALL, "--max-memory", "0")["recommendation"]
    assert (nothing["method"], nothing["available"]) == ("banded-inverse", True)
    assert nothing["best_fractional"] is None
    assert nothing["best_correlated"]["method"] == "banded-inverse"


def test_prv_is_answered_by_pld() -> None:
    report = run_json("plan --dataset-size 9 --lot 9 --epochs 1 --epsilon 1 --accountant prv")
    assert report["accountant"] == "pld"


@pytest.mark.parametrize(
    ("name", "start"), [("a.png", b"\x89PNG"), ("b.PDF", b"%PDF"), ("c.svg", b"<?xml")]
)
def test_the_plot(name: str, start: bytes) -> None:
    result = run(SMALL, "--plot", name)
    assert result.stdout.endswith(f"\nplot  {name}\n")
    assert Path(name).read_bytes().startswith(start)
    assert [path.name for path in Path().iterdir()] == [name]


def test_the_plot_shows_every_order_and_the_choice() -> None:
    run_json(SMALL, "--plot", "plan.svg", "--max-memory", "3")
    text = Path("plan.svg").read_text()
    for order in planning.ORDERS:
        assert f"<!-- order {order:g} -->" in text
    chosen = small(max_memory=3).recommended
    assert f"<!-- recommended ({chosen.ratio:.3f}) -->" in text
    assert "<!-- too much memory -->" in text
    run(SMALL.replace("--lot 50", "--lot 600"), "--plot", "none.svg")
    text = Path("none.svg").read_text()
    assert "<!-- recommended (1.000) -->" in text
    assert "order" not in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--dataset-size 0", "dataset_size=0 must be a whole number of at least 1"),
        ("--dataset-size 40", "lot 50 is larger than the dataset of 40 records: give a lot"),
        ("--lot 0", "lot=0 must be a whole number"),
        ("--lot -3", "lot=-3 must be a whole number"),
        ("--lot 1.5", "Invalid value for '--lot'"),
        ("--lot 1001", "lot 1001 is larger than the dataset of 1000 records"),
        ("--epochs 0", "epochs=0 must be a whole number"),
        ("--epochs 1000000", "20000000 steps, more than 10000000: raise the lot"),
        ("--epsilon 0", "epsilon 0.0 is out of range: give a finite number above 0"),
        ("--epsilon -1", "epsilon -1.0 is out of range: give a finite number above 0"),
        ("--epsilon nan", "epsilon nan is out of range: give a finite number above 0"),
        ("--epsilon inf", "epsilon inf is out of range: give a finite number above 0"),
        ("--epsilon 1e-300 --delta 1e-300", "cannot be reached"),
        ("--delta 0", "delta 0.0 is out of range: give a number strictly between 0 and 1"),
        ("--delta 1", "delta 1.0 is out of range: give a number strictly between 0 and 1"),
        ("--accountant gdp", "accountant 'gdp' is unknown"),
        ("--max-memory -1", "max_memory=-1 must be a whole number of at least 0"),
        ("--plot plan.txt", "plot 'plan.txt' has no known image format"),
        ("--plot missing/plan.png", "plot 'missing/plan.png' cannot be written"),
    ],
)
def test_bad_input_gets_one_line(arguments: str, message: str) -> None:
    for more in ((), ("--json",)):
        result = run(f"{SMALL} {arguments}", *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert result.stderr.startswith("vestige: error: ")
        assert message in result.stderr
        assert result.stderr.count("\n") == 1
    assert not list(Path().iterdir())


@pytest.mark.parametrize("missing", ["--dataset-size", "--lot", "--epochs", "--epsilon"])
def test_the_four_numbers_are_required(missing: str) -> None:
    given = dict(zip(SMALL.split()[1::2], SMALL.split()[2::2], strict=True))
    del given[missing]
    result = run("plan", *(word for pair in given.items() for word in pair))
    assert result.exit_code == 2
    assert f"Missing option '{missing}'" in result.stderr


def test_torch_is_not_imported_before_there_is_something_to_compute() -> None:
    program = (
        "import sys\n"
        "from vestige.cli.app import app\n"
        f"for arguments in ('plan --help', '{SMALL} --plot a.txt'):\n"
        "    try:\n"
        "        app(arguments.split())\n"
        "    except SystemExit as end:\n"
        "        print('code', end.code, 'torch' in sys.modules)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    codes = [line for line in ran.stdout.splitlines() if line.startswith("code")]
    assert codes == ["code 0 False", "code 2 False"]
