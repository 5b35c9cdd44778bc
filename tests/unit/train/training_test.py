"""Training from a configuration to a result: epsilon, noise, seeds, caveats."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.support.own_tables import of_users, write_table
from tests.support.training import (
    equal,
    lines,
    read,
    tiny,
    weights,
)
from vestige import methods
from vestige.engine.caveats import REPEATABLE
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.methods import MethodInfo
from vestige.privacy import accounting
from vestige.privacy.ledger import Event
from vestige.train import models
from vestige.train.config import TrainConfig
from vestige.train.training import train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_what_the_data_decide_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    """Found after loading: nothing was calibrated, trained or written by then."""
    cases = [
        (tiny(train_size=None, lot=1438), "lot 1438 is larger than the training data of 1437"),
        (tiny(train_size=1438), "train_size is 1438"),
        (tiny(test_size=361), "test_size is 361"),
        (tiny(clip=(1.0, 2.0)), "clip has 2 numbers for 1 clipping groups"),
        (tiny(model="mlp", clip=(1.0, 2.0), clipping="per_layer"), "hidden1, hidden2, out"),
        (tiny(device="cuda:99"), "device 'cuda:99' is not there"),
    ]
    for config, message in cases:
        with pytest.raises(ConfigError) as caught:
            train(config)
        assert message in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_the_result_says_what_was_run() -> None:
    result = train(tiny(steps=None, epochs=2, clip=0.5, clipping="per_layer", lr=0.25, seed=3))
    expected = {
        "method": "dp-sgd",
        "dataset": "digits",
        "model": "linear",
        "accountant": "rdp",
        "sample_rate": 0.2,
        "lot": 8,
        "records": 40,
        "steps": 10,
        "epochs": 2.0,
        "clip": 0.5,
        "clipping": "per_layer",
        "lr": 0.25,
        "seed": 3,
        "parameters": 650,
        "optimizer": "SGD",
        "repeatable_noise": False,
        "interrupted": False,
        "guarantee": accounting.GUARANTEE,
    }
    assert {key: result[key] for key in expected} == expected


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
def test_epsilon_is_that_of_the_releases_that_were_made(accountant: str) -> None:
    result = train(tiny(accountant=accountant, noise_multiplier=1.3, delta=1e-4))
    expected = accounting.epsilon([Event(8 / 40, 1.3, 7)], 1e-4, accountant)
    assert result["epsilon"] == expected
    live = [line["epsilon"] for line in lines(result)]
    assert 0 < live[0] <= live[1] <= expected


@pytest.mark.parametrize("accountant", accounting.ACCOUNTANTS)
@pytest.mark.parametrize("target", [0.7, 4.0])
def test_a_target_is_reached_and_never_exceeded(accountant: str, target: float) -> None:
    result = train(tiny(epsilon=target, accountant=accountant))
    assert result["target_epsilon"] == target
    assert 0.99 * target < result["epsilon"] <= target
    recomputed = accounting.epsilon(
        [Event(result["sample_rate"], result["noise_multiplier"], result["steps"])],
        result["delta"],
        accountant,
    )
    assert recomputed == result["epsilon"]
    assert all(line["epsilon"] <= target for line in lines(result))


def test_without_noise_epsilon_is_null_and_the_guarantee_none() -> None:
    result = train(tiny(noise_multiplier=0.0))
    assert result["epsilon"] is None
    assert result["guarantee"] == "none"
    assert any("no noise" in caveat for caveat in result["caveats"])
    assert all(line["epsilon"] is None for line in lines(result))
    assert read(result, "config.json")["planned_epsilon"] is None


def test_lots_noise_and_clip_bounds_are_handed_to_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans: list[Any] = []
    original = PrivacyEngine.make_private

    def keep(self: PrivacyEngine, **options: Any) -> Any:
        made = original(self, **options)
        plans.append(self.plan)
        return made

    monkeypatch.setattr(PrivacyEngine, "make_private", keep)
    bounds = (0.5, 1.0, 2.0)
    train(tiny(model="mlp", clip=bounds, clipping="per_layer", noise_multiplier=0.7))
    plan = plans[0]
    assert plan.bounds == bounds
    assert plan.noise_multiplier == 0.7
    assert (plan.batch_size, plan.dataset_size, plan.steps) == (8, 40, 7)
    assert plan.noise_stds == pytest.approx([0.7 * math.sqrt(5.25)] * 3)


def test_the_settings_of_a_method_reach_it_and_its_accounting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    @dataclass(frozen=True)
    class Tempered(methods.Method):
        info = MethodInfo(name="tempered", guarantee="proven: for tests")
        clipping = "per_layer"
        beta: float = 1.0

        @property
        def query_weight(self) -> float:
            return self.beta

    row = MethodInfo(name="tempered", home=Tempered, guarantee="proven: for tests")
    monkeypatch.setitem(methods.METHODS, "tempered", row)
    result = train(tiny(method="tempered", settings={"beta": 0.5}))
    assert result["settings"] == {"beta": 0.5}
    assert result["clipping"] == "per_layer"
    assert result["epsilon"] == accounting.epsilon([Event(0.2, 2.0, 7)], 1e-5, "rdp")
    assert result["epsilon"] == read(result, "config.json")["planned_epsilon"]
    target = train(tiny(method="tempered", settings={"beta": 0.5}, epsilon=1.0))
    assert 0.99 < target["epsilon"] <= 1.0


def test_what_is_treated_as_public_is_said(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    arrays = {
        "x_train": rng.normal(size=(30, 4)).astype(np.float32),
        "y_train": np.arange(30) % 3,
        "x_test": rng.normal(size=(9, 4)).astype(np.float32),
        "y_test": np.arange(9) % 3,
    }
    np.savez(tmp_path / "own data.npz", **arrays)
    config = tiny(dataset="own data.npz", train_size=None, test_size=None, delta=0.05)
    result = train(config)
    assert Path(result["folder"]).name.startswith("own_data-linear-dp-sgd-")
    text = "\n".join(result["caveats"])
    assert "the number of records, 30, is treated as public" in text
    assert "the number of classes, 3, was read off the labels" in text
    assert "delta 0.05 is above 1 / records" in text
    np.savez(tmp_path / "stated.npz", classes=3, **arrays)
    stated = train(config.changed(dataset="stated.npz", delta=0.01))
    assert "classes" not in "\n".join(stated["caveats"])
    assert "delta" not in "\n".join(stated["caveats"])


def test_a_noise_seed_repeats_the_run_bit_for_bit_and_is_written_nowhere() -> None:
    first, second = (train(tiny(noise_seed=918273645, train_loss=True)) for _ in range(2))
    assert equal(weights(first), weights(second))
    assert first["repeatable_noise"] is True
    assert REPEATABLE in first["caveats"]
    for file in Path(first["folder"]).iterdir():
        assert b"918273645" not in file.read_bytes()
        assert b"noise_seed" not in file.read_bytes()
    other = train(tiny(noise_seed=918273646))
    assert not equal(weights(first), weights(other))


def test_without_a_noise_seed_no_two_runs_agree() -> None:
    first, second = (train(tiny(seed=1)) for _ in range(2))
    assert first["repeatable_noise"] is False
    assert REPEATABLE not in first["caveats"]
    assert not equal(weights(first), weights(second))


def test_the_seed_fixes_initial_weights_and_split() -> None:
    """A learning rate next to zero leaves the initial weights, and the split shows in the loss."""
    still = {"lr": 1e-30, "noise_multiplier": 0.0}
    first, second, other = (train(tiny(seed=seed, **still)) for seed in (4, 4, 5))
    assert equal(weights(first), weights(second))
    assert first["loss"] == second["loss"]
    assert not equal(weights(first), weights(other))
    model = models.build("linear", (1, 8, 8), 10, seed=4)
    assert equal(weights(first), dict(model.state_dict()))


def test_private_training_learns() -> None:
    """The settings of the demo, shorter: far above the 10 % of guessing."""
    result = train(TrainConfig(epochs=4, accountant="rdp", device="cpu", noise_seed=1))
    assert result["steps"] == 4 * 23
    assert result["accuracy"] > 0.6


def test_another_optimizer_can_be_given() -> None:
    result = train(tiny(noise_seed=5), optimizer=torch.optim.Adam)
    assert result["optimizer"] == "Adam"
    assert not equal(weights(result), weights(train(tiny(noise_seed=5))))


def test_a_run_for_users_counts_them_and_writes_no_id(tmp_path: Path) -> None:
    path = write_table(tmp_path / "t.csv", of_users())
    folder = tmp_path / "run"
    config = TrainConfig(
        dataset=str(path),
        units="who",
        rows_per_unit=3,
        lot=8,
        steps=4,
        epsilon=3.0,
        noise_seed=1,
        out=folder,
    )
    result = train(config)
    users = len({one["who"] for one in of_users()})
    assert 0.6 * users < result["records"] < users
    assert result["sample_rate"] == 8 / result["records"]
    assert result["adjacency"] == "add or remove one user with all rows"
    assert 2.9 < result["epsilon"] <= 3.0
    assert read(result, "config.json")["units"] == "who"
    written = [file for file in folder.rglob("*") if file.is_file()]
    assert len(written) > 4
    assert not any(b"zqx" in file.read_bytes() for file in written)


def test_views_of_images_leave_epsilon_as_it_is(tmp_path: Path) -> None:
    plain, views = tiny(), tiny(views=4, mix_views=True)
    results = [
        train(config.changed(out=tmp_path / name)) for config, name in ((plain, "a"), (views, "b"))
    ]
    assert results[0]["epsilon"] == results[1]["epsilon"]
    assert results[0]["loss"] != results[1]["loss"]
    assert "4 augmented views" in (tmp_path / "b" / "statement.md").read_text()


def test_bfloat16_learns_nearly_the_same_and_is_said(tmp_path: Path) -> None:
    plain = train(tiny(noise_seed=1, out=tmp_path / "a"))
    low = train(tiny(noise_seed=1, precision="bfloat16", out=tmp_path / "b"))
    assert low["epsilon"] == plain["epsilon"]
    assert low["loss"] != plain["loss"]
    assert low["loss"] == pytest.approx(plain["loss"], rel=0.02)
    assert json.loads((tmp_path / "b" / "config.json").read_text())["precision"] == "bfloat16"
    weights = torch.load(tmp_path / "b" / "model.pt", weights_only=True)
    assert {value.dtype for value in weights.values()} == {torch.float32}
