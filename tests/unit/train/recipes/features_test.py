"""Heads on features: inputs and features give the same scores, and a run learns the head alone."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import vestige
from vestige import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.data import load
from vestige.train.models import build
from vestige.train.recipes.features import OnFeatures, with_features
from vestige.train.training import prepare, train


def test_scores_of_features_are_those_of_the_inputs():
    model = build("scatter", (3, 16, 16), 4, seed=0)
    x = torch.rand(5, 3, 16, 16)
    assert torch.equal(model(model.features(x)), model(x))


def test_features_are_computed_once_and_told():
    model, dataset = build("scatter", (1, 8, 8), 10), load("digits", None, 300, 50, 0)
    heard: list[float] = []
    made = with_features(dataset, model, "cpu", heard.append)
    assert heard == sorted(heard)
    assert heard[-1] == 1
    assert [len(part) for part in made.features] == [300, 50]
    assert torch.allclose(made.features[0], model.features(dataset.x_train))
    assert with_features(made, model, "cpu", heard.append) is made
    assert made.input_shape == (1, 8, 8)


def test_other_models_have_no_features():
    dataset = load("digits", None, 300, 50, 0)
    assert with_features(dataset, build("mlp", (1, 8, 8), 10), "cpu", print) is dataset


def test_fixed_features_have_no_training_mode():
    model = OnFeatures(torch.nn.Dropout(), torch.nn.Dropout(), (3,)).train()
    assert model.training
    assert model.head.training
    assert not model.features.training


def test_a_run_trains_on_features_and_its_model_takes_images(tmp_path):
    config = TrainConfig(
        recipe="scatter",
        lot=256,
        epochs=4,
        epsilon=8.0,
        out=tmp_path / "run",
        seed=0,
        noise_seed=3,
    )
    assert (config.chosen_model, config.momentum, config.chosen_lr) == ("scatter", 0.9, 0.2)
    result = train(config)
    assert result["accuracy"] > 0.6
    assert result["parameters"] == 81 * 4 * 10 + 10
    facts = json.loads((tmp_path / "run/model.json").read_text())
    assert facts["input_shape"] == [1, 8, 8]
    test = load("digits", None, None, None, 0)
    model = vestige.load(tmp_path / "run")
    right = (model(test.x_test).argmax(1) == test.y_test).float().mean()
    assert float(right) == pytest.approx(result["accuracy"])
    assert json.loads((tmp_path / "run/config.json").read_text())["recipe"] == "scatter"


def test_features_that_are_there_are_taken():
    dataset = load("digits", None, 300, 50, 0)
    known = torch.randn(300, 81, 2, 2), torch.randn(50, 81, 2, 2)
    config = TrainConfig(model="scatter", lot=50, steps=1, noise_multiplier=1.0)
    session = prepare(config, dataset=replace(dataset, features=known))
    assert torch.equal(session.train_data[0], known[0])


def test_momentum_is_of_plain_sgd():
    with pytest.raises(ConfigError, match=r"momentum 0\.9 is of plain SGD"):
        TrainConfig(method="dp-adam", momentum=0.9)
    with pytest.raises(ConfigError, match="strictly between 0 and 1"):
        TrainConfig(momentum=1.0)
