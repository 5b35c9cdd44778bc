"""Which rows there are: the fair column waits for its tuning, which never sees a test image."""

from __future__ import annotations

import itertools
import shutil
import zipfile
from collections import Counter
from pathlib import Path

import numpy as np
import pytest

from tests.support.experiments import FAIR, TOY, quiet, written
from vestige.lab.grid import chosen
from vestige.lab.rows import Rows
from vestige.lab.runner import Request
from vestige.lab.summary import rows_of, summarised


def test_the_fair_column_tunes_then_runs(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + FAIR)
    outcome = quiet(Request(experiments=(toy,), out=tmp_path / "out", column="fair"))
    assert outcome.complete and not outcome.failures
    rows = Rows(tmp_path / "out").refresh()
    tuning = [row for row in rows.values() if row["role"] == "tuning"]
    finals = [row for row in rows.values() if row["role"] == "final"]
    assert len(tuning) == 4 and {row["seed"] for row in tuning} == {100}
    assert {row["seed"] for row in finals} == {0, 1}
    for row in finals:
        assert row["epsilon"] <= 2.0
        assert row["epsilon"] == pytest.approx(2.0, rel=2e-3)
        assert row["config"]["test_range"] == [0, 100]
    assert toy.fair is not None
    for arm in toy.fair.arms[:2]:
        own = [row for row in tuning if row["label"] == arm.label]
        best = max(own, key=lambda row: (row["final_accuracy"], -row["final_loss"]))
        assert chosen(toy, "digits", 2.0, arm, rows) == (best["lr"], {})
    control = rows_of(toy, rows)
    rates = {row["label"]: row["lr"] for row in control if row["role"] == "final"}
    assert rates["control"] == rates["FO"]


def test_settings_are_tuned_with_the_rate_in_all_combinations(tmp_path: Path) -> None:
    """FO's beta and window are chosen on validation images; its follower has the rate alone."""
    choices = 'method = "fo"\nchoices = { beta = [0.6, 0.9], window = [2, 4] }\nrates'
    toy = written(tmp_path, TOY + FAIR.replace('method = "fo"\nrates', choices))
    assert toy.fair is not None
    outcome = quiet(Request(experiments=(toy,), out=tmp_path / "out", column="fair"))
    assert outcome.complete and not outcome.failures
    rows = Rows(tmp_path / "out").refresh()
    tuning = [r for r in rows.values() if r["role"] == "tuning" and r["label"] == "FO"]
    tried = {(r["lr"], r["settings"]["beta"], r["settings"]["window"]) for r in tuning}
    assert tried == set(itertools.product((0.1, 1.0), (0.6, 0.9), (2, 4)))
    best = min(tuning, key=lambda row: (-row["final_accuracy"], row["final_loss"], row["lr"]))
    for row in rows_of(toy, rows):
        if row["role"] == "final" and row["label"] != "DP-SGD":
            assert row["lr"] == best["lr"]
            assert row["label"] == "control" or row["settings"] == best["settings"]
    fo = summarised(toy, rows_of(toy, rows))["fair"][0]["lines"][1]
    words = f"{best['lr']} beta {best['settings']['beta']} window {best['settings']['window']}"
    assert len(fo["tuning"]) == 8 and fo["tuning"][words] == best["final_accuracy"]


def images(folder: Path, spoilt: bool) -> None:
    """A small mnist.npz; if `spoilt`, its test images cannot be read."""
    generator = np.random.default_rng(0)
    arrays = {
        "x_train": generator.integers(0, 256, (500, 28, 28), dtype=np.uint8),
        "y_train": np.arange(500, dtype=np.uint8) % 10,
        "x_test": generator.integers(0, 256, (100, 28, 28), dtype=np.uint8),
        "y_test": np.arange(100, dtype=np.uint8) % 10,
    }
    folder.mkdir()
    np.savez(folder / "mnist.npz", **arrays)
    if spoilt:
        with zipfile.ZipFile(folder / "mnist.npz") as whole:
            members = {name: whole.read(name) for name in whole.namelist()}
        with zipfile.ZipFile(folder / "mnist.npz", "w") as file:
            for name, content in members.items():
                file.writestr(name, b"not an array" if "test" in name else content)


def test_tuning_never_reads_the_test_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test set raises when it is touched: all tuning is done before the first final row is."""
    images(tmp_path / "data", spoilt=True)
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "data"))
    text = (TOY + FAIR).replace('"digits"', '"mnist"').replace("digits = 0.2", "mnist = 0.2")
    toy = written(tmp_path, text)
    outcome = quiet(Request(experiments=(toy,), out=tmp_path / "out", column="fair"))
    rows = Rows(tmp_path / "out").refresh()
    assert Counter(row["role"] for row in rows.values()) == {"tuning": 4}
    assert outcome.finished == 4 and len(outcome.failures) == outcome.total - 4
    assert all("mnist.npz" in failure for failure in outcome.failures)
    assert toy.fair is not None
    best = chosen(toy, "mnist", 2.0, toy.fair.arms[0], rows)
    assert best is not None and best.rate in (0.1, 1.0)
    # Mended, the command goes on where it was.
    shutil.rmtree(tmp_path / "data")
    images(tmp_path / "data", spoilt=False)
    again = quiet(Request(experiments=(toy,), out=tmp_path / "out", column="fair"))
    assert again.complete and again.made == again.total - 4
