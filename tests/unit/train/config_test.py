"""The settings of a run: their defaults, and every refusal."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.support.training import (
    tiny,
)
from vestige import methods
from vestige.errors import ConfigError
from vestige.train import config as settings
from vestige.train import data, engine_options, models
from vestige.train.config import TrainConfig

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_names_are_those_of_the_rooms_that_need_torch() -> None:
    assert settings.DATASETS == data.DATASETS
    assert settings.MODELS == models.MODELS
    assert set(engine_options.ROWS_AT_ONCE) == set(models.MODELS)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dataset": "nope"}, "dataset 'nope' is neither"),
        ({"dataset": "no/such.npz"}, "nor a file or folder of your own"),
        ({"dataset": ".", "train_size": None}, "has no public schema"),
        ({"dataset": "a" * 300}, "nor a file or folder of your own"),
        ({"model": "vgg"}, "model 'vgg' is unknown"),
        ({"units": "who"}, "units who and rows_per_unit None: give both"),
        ({"rows_per_unit": 3}, "units None and rows_per_unit 3: give both"),
        ({"units": "who", "rows_per_unit": 3}, "units is for tables"),
        ({"views": 0}, "views"),
        ({"views": 3, "mix_views": True}, "mix_views with views 3: mixtures take two"),
        ({"precision": "float16"}, "precision"),
        ({"method": "sgd"}, "method='sgd' is unknown"),
        ({"settings": {"beta": 0.9}}, "no setting 'beta'"),
        ({"noise_multiplier": 1.0, "epsilon": 1.0}, "both given"),
        ({"noise_multiplier": -1.0}, "noise_multiplier -1.0 is out of range"),
        ({"noise_multiplier": math.nan}, "noise_multiplier nan is out of range"),
        ({"noise_multiplier": math.inf}, "noise_multiplier inf is out of range"),
        ({"noise_multiplier": True}, "noise_multiplier True is out of range"),
        ({"epsilon": 0.0}, "epsilon 0.0 is out of range"),
        ({"epsilon": math.inf}, "epsilon inf is out of range"),
        ({"delta": 1.0}, "delta 1.0 is out of range: give a number strictly between 0 and 1"),
        ({"delta": 0.0}, "delta 0.0 is out of range: give a number strictly between 0 and 1"),
        ({"delta": math.nan}, "delta nan is out of range: give a number strictly between 0 and 1"),
        ({"accountant": "gdp"}, "accountant 'gdp' is unknown"),
        ({"lot": 0}, "lot=0 must be a whole number"),
        ({"lot": 2.5}, "lot=2.5 must be a whole number"),
        ({"lot": 41}, "lot 41 is larger than the training data of 40 records"),
        ({"epochs": 0, "steps": None}, "epochs=0 must be a whole number"),
        ({"steps": -3}, "steps=-3 must be a whole number"),
        ({"epochs": 2}, "both given"),
        ({"train_size": 0}, "train_size=0 must be a whole number"),
        ({"test_size": 0}, "test_size=0 must be a whole number"),
        ({"clip": 0.0}, "clip 0.0 is out of range"),
        ({"clip": (1.0, -1.0)}, "clip -1.0 is out of range"),
        ({"clipping": "by_moon"}, "clipping 'by_moon' is unknown"),
        ({"lr": 0.0}, "lr 0.0 is out of range"),
        ({"lr": math.nan}, "lr nan is out of range"),
        ({"seed": -1}, "seed=-1 must be a whole number"),
        ({"seed": 2**63}, "must be a whole number"),
        ({"noise_seed": 1.5}, "noise_seed must be a whole number"),
        ({"device": "tpu"}, "device 'tpu' is unknown"),
        ({"device": "cuda:x"}, "device 'cuda:x' is unknown"),
        ({"data_dir": Path("nowhere")}, "data_dir 'nowhere' is no folder"),
    ],
)
def test_a_bad_setting_is_refused_at_construction(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny(**changes)
    assert message in str(caught.value)


def test_an_out_folder_in_use_or_out_of_reach_is_refused(tmp_path: Path) -> None:
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    for out in ("full", "full/file", "full/file/deeper", "a" * 300):
        with pytest.raises(ConfigError, match=r"^out "):
            tiny(out=tmp_path / out)
    (tmp_path / "runs").touch()
    with pytest.raises(ConfigError, match="'runs' is not a folder"):
        tiny()


def test_defaults_follow_the_dataset_and_the_method(tmp_path: Path) -> None:
    np.savez(tmp_path / "own.npz", x_train=np.zeros((2, 3)))
    for dataset, model, lot in [
        ("digits", "mlp", 64),
        ("own.npz", "mlp", 64),
        ("svhn", "cnn", 512),
    ]:
        config = TrainConfig(dataset=dataset)
        assert (config.chosen_model, config.chosen_lot) == (model, lot)
    assert TrainConfig().chosen_clipping == methods.DPSGD.clipping
    assert TrainConfig(clipping="per_layer").chosen_clipping == "per_layer"
    assert TrainConfig().planned_steps(1437) == 30 * 23
    assert TrainConfig(epochs=2).planned_steps(1437) == 2 * 23
    assert TrainConfig(steps=5).planned_steps(1437) == 5


def test_the_noise_seed_is_in_no_representation() -> None:
    config = tiny(noise_seed=918273645)
    assert "918273645" not in repr(config) + str(config.public())
    assert config.public()["repeatable_noise"] is True
    with pytest.raises(ValidationError, match="frozen"):
        config.lot = 3  # type: ignore[misc]
