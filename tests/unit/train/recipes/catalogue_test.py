"""Recipes fill in what is not given, and nothing else."""

from __future__ import annotations

import pytest

from vestige import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.recipes.catalogue import RECIPES, filled_in

FEATURES = {"probe": {"features": "scatter"}}


@pytest.mark.parametrize("name", RECIPES)
def test_every_value_of_a_recipe_is_a_setting_that_is_accepted(name):
    config = TrainConfig(recipe=name, dataset="cifar10", epsilon=3.0, **FEATURES.get(name, {}))
    for key, value in RECIPES[name].settings.items():
        assert getattr(config, key) == value


@pytest.mark.parametrize("name", RECIPES)
def test_what_is_given_stands(name):
    config = TrainConfig(recipe=name, lot=100, steps=7, model="linear", **FEATURES.get(name, {}))
    assert (config.lot, config.steps, config.epochs, config.model) == (100, 7, None, "linear")


def test_without_a_recipe_nothing_is_filled_in():
    assert filled_in({"lot": None}) == {"lot": None}


def test_an_unknown_recipe_is_refused():
    with pytest.raises(ConfigError, match="recipe"):
        TrainConfig(recipe="soup")
