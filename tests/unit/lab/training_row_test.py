"""One row: complete, repeatable, with the formal epsilon beside the papers'."""

from __future__ import annotations

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.support.experiments import FAIR, TOY, written
from vestige.errors import ConfigError
from vestige.lab.definition import Experiment
from vestige.lab.grid import tasks_of
from vestige.lab.rows import parsed
from vestige.lab.setting import config_hash
from vestige.lab.training_row import make_row
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.data import load_ranges


@pytest.fixture
def toy(tmp_path: Path) -> Experiment:
    """An experiment that takes a second."""
    return written(tmp_path, TOY)


def test_a_row_holds_everything_and_can_be_made_again(toy: Experiment) -> None:
    task = next(t for t in tasks_of(toy, {}) if t.label == "FO")
    row = make_row(task)
    expected = {
        "hash", "experiment", "column", "role", "label", "config", "dataset", "model", "method",
        "settings", "seed", "lr", "final_accuracy", "best_accuracy", "final_loss", "epsilon",
        "epsilon_marginal", "delta", "noise_multiplier", "steps", "epochs", "seconds", "curve",
        "diagnostics", "versions", "hardware",
    }  # fmt: skip
    assert expected <= row.keys()
    assert parsed(json.dumps(row).encode()) == row
    assert row["steps"] == 12 and row["epochs"] == 2
    assert row["curve"]["epoch"] == [1, 2]
    assert row["curve"]["accuracy"][-1] == row["final_accuracy"]
    assert row["best_accuracy"] == max(row["curve"]["accuracy"])
    again = make_row(task)
    for changing in ("seconds",):
        row.pop(changing), again.pop(changing)
    assert row == again


def test_a_row_has_the_formal_epsilon_and_the_papers(toy: Experiment) -> None:
    row = make_row(next(t for t in tasks_of(toy, {}) if t.label == "FO"))
    event = Event(50 / 300, 1.0 / 0.8, 12)
    assert row["epsilon"] == accounting.epsilon([event], 1e-5, "pld")
    assert row["epsilon_marginal"] == accounting.epsilon([event], 1e-5, "rdp_classic")
    curve = row["curve"]["epsilon_marginal"]
    half = accounting.epsilon([replace(event, count=6)], 1e-5, "rdp_classic")
    assert curve == pytest.approx([half, row["epsilon_marginal"]], rel=1e-3)


def test_the_papers_noise_is_in_every_group(toy: Experiment) -> None:
    """sigma_g in each of the MLP's three groups, each clipped at the whole C."""
    task = next(t for t in tasks_of(toy, {}) if t.label == "FO")
    assert task.run is not None
    run_ = task.run.model_copy(
        update={
            "model": "mlp",
            "clipping": "per_layer",
            "noise_multiplier": None,
            "group_noise_multiplier": 1.1,
        }
    )

    session = training.prepare(run_.train_config(), dataset=load_ranges("digits", (0, 300), (0, 9)))
    plan = session.engine.plan
    assert plan.bounds == (1.0, 1.0, 1.0)
    assert plan.noise_multiplier == pytest.approx(1.1 / 3**0.5)
    row = make_row(replace(task, run=run_, config=run_.config()))
    marginal = accounting.epsilon([Event(50 / 300, 1.1 / 0.8, 12)], 1e-5, "rdp_classic")
    assert row["epsilon_marginal"] == marginal
    joint = accounting.epsilon([Event(50 / 300, 1.1 / 3**0.5 / 0.8, 12)], 1e-5, "pld")
    assert row["epsilon"] == pytest.approx(joint, rel=1e-9)
    assert row["epsilon"] > marginal


def test_group_noise_excludes_other_noise() -> None:
    with pytest.raises(ConfigError, match="group_noise_multiplier"):
        TrainConfig(group_noise_multiplier=1.0, epsilon=1.0)


def test_momentum_is_the_optimizers(toy: Experiment) -> None:
    task = next(iter(tasks_of(toy, {})))
    assert task.run is not None
    run_ = task.run.model_copy(update={"momentum": 0.9})
    row = make_row(replace(task, run=run_, config=run_.config(), hash=config_hash(run_.config())))
    assert row["optimizer"] == "SGD"
    assert row["final_loss"] != make_row(task)["final_loss"]


def test_the_same_epsilon_means_each_methods_own_noise(tmp_path: Path) -> None:
    toy = written(tmp_path, TOY + FAIR)
    tasks = {task.label: task for task in tasks_of(toy, {}, ("fair",))}
    plain_, memory = make_row(tasks["DP-SGD"]), make_row(tasks["FO"])
    assert plain_["epsilon"] == pytest.approx(memory["epsilon"], rel=1e-3)
    assert memory["noise_multiplier"] == pytest.approx(0.9 * plain_["noise_multiplier"], rel=1e-3)


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


def test_ranges_are_of_the_split_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    images(tmp_path / "data", spoilt=False)
    monkeypatch.setenv("VESTIGE_DATA", str(tmp_path / "data"))
    held_out = load_ranges("mnist", (0, 300), (20, 40))
    tuning = load_ranges("mnist", (0, 300), (300, 340), validation=True)
    with np.load(tmp_path / "data" / "mnist.npz") as file:
        scaled = {name: (file[name] / 255 - 0.5) / 0.5 for name in ("x_train", "x_test")}
    assert np.allclose(held_out.x_test[:, 0], scaled["x_test"][20:40], atol=1e-6)
    assert np.allclose(tuning.x_test[:, 0], scaled["x_train"][300:340], atol=1e-6)
    assert held_out.y_test.tolist() == [i % 10 for i in range(20, 40)]
    for split, span in (("train", {"train": (0, 501)}), ("test", {"held_out": (0, 101)})):
        with pytest.raises(ConfigError, match=split):
            load_ranges("mnist", **({"train": (0, 300), "held_out": (0, 9)} | span))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="Unknown dataset"):
        load_ranges("nist", (0, 1), (0, 1))
