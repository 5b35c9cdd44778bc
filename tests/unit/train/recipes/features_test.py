"""Heads on features: inputs and features give the same scores, and a run learns the head alone."""

from __future__ import annotations

import json
import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import vestige
from tests.support.leak_search import Secrets
from tests.support.training import equal, press_at, weights
from vestige import ConfigError
from vestige.train.config import TrainConfig
from vestige.train.data import load
from vestige.train.models import build, on_features
from vestige.train.recipes.features import OnFeatures, check_rows, probe, with_features
from vestige.train.training import prepare, resume, train


@pytest.mark.parametrize("name", ["scatter", "scatter-mirror", "scatter-cnn"])
@pytest.mark.parametrize("shape", [(3, 16, 16), (1, 28, 28)])
def test_scores_of_features_are_those_of_the_inputs(name, shape):
    model = build(name, shape, 4, seed=0)
    x = torch.rand(5, *shape)
    assert torch.equal(model(model.features(x)), model(x))


@pytest.mark.parametrize("shape", [(3, 32, 32), (1, 28, 28), (1, 8, 8)])
def test_mirrored_features_do_not_tell_left_from_right(shape):
    model, plain = build("scatter-mirror", shape, 4, seed=0), build("scatter", shape, 4, seed=0)
    x = torch.rand(5, *shape)
    made = model.features(x)
    assert torch.equal(made, model.features(x.flip(-1)))
    assert tuple(made.shape[1:]) == model.shape
    assert model.shape[-1] == plain.shape[-1] // 2 + 1
    both = (plain.features(x) + plain.features(x.flip(-1))) / 2
    assert torch.equal(made, both[..., : model.shape[-1]])


def test_the_half_that_mirrored_features_leave_out_says_little():
    """The left half tells the right half of images that it was not fitted to."""
    from vestige.train.recipes.features import Mirrored
    from vestige.train.recipes.public_scale import random_images

    model = build("scatter-mirror", (3, 32, 32), 4, seed=0)
    assert isinstance(model.features, Mirrored)
    images = random_images((3, 32, 32), 60, seed=1)
    inner = model.features.features
    whole = (inner(images) + inner(images.flip(-1))) / 2
    for left, right in ((1, 7), (2, 6), (3, 5)):  # a pixel nearer to the middle, or further
        a, b = whole[..., left].mean((1, 2)), whole[..., right].mean((1, 2))
        assert float(torch.corrcoef(torch.stack([a, b]))[0, 1]) > 0.9


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
    assert (config.chosen_model, config.momentum, config.chosen_lr) == ("scatter", 0.9, 0.1)
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


# -- modules of somebody's own ----------------------------------------------------------------

MODULES = """
import torch
from torch import nn
from torch.nn import functional as F

class Of(nn.Module):
    def __init__(self, function):
        super().__init__()
        self.function = function
        self.register_buffer("memory", torch.zeros(64))
    def forward(self, x):
        return self.function(self, x.flatten(1))

class Sticky(nn.BatchNorm1d):
    def train(self, mode=True):
        return super().train(True)

def remember(self, x):
    self.memory.mul_(0.9).add_(x.mean(0))
    return x

def conv(shape):
    return nn.Sequential(nn.Conv2d(shape[0], 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten())

ROWS = {
    "centred": lambda shape: Of(lambda self, x: x - x.mean(0)),
    "statistics": lambda shape: nn.Sequential(
        nn.Flatten(), nn.BatchNorm1d(64, track_running_stats=False)
    ),
    "sticky": lambda shape: nn.Sequential(nn.Flatten(), Sticky(64)),
    "remembering": lambda shape: Of(remember),
    "neighbour": lambda shape: Of(lambda self, x: x.roll(1, 0)),
    "chance": lambda shape: Of(lambda self, x: F.dropout(x, 0.5, True)),
    "late": lambda shape: Of(lambda self, x: x - x.mean(0) if len(x) > 99 else x),
}

class Words(nn.Module):
    def __init__(self, centred=False, said=9):
        super().__init__()
        self.inner, self.token_ids = nn.Embedding(9, 4), said
        self.centred = centred
    def forward(self, x):
        made = self.inner(x.long().flatten(1)).mean(1)
        return made - made.mean(0) if self.centred else made

def timid(self, x):
    if (x > 1000).any():
        raise ValueError(x.max(), "is beyond 1000")
    return x

def words(shape):
    return Words()

def meeting_words(shape):
    return Words(centred=True)

def undeclared_words(shape):
    return Words(said=None)

def too_few_words(shape):
    return Words(said=10)

def wrong_words(shape):
    return Words(said="9")

def negative(shape):
    return Of(lambda self, x: torch.multinomial(x + 0.1, 2).float())

def records_alone(shape):
    return Of(timid)

def text(shape):
    return Of(lambda self, x: "features")

def raising(shape):
    raise ValueError("no such weights")

def not_finite(shape):
    return Of(lambda self, x: x.log())

def flat(shape):
    return nn.Flatten()

globals().update(ROWS)
"""


@pytest.fixture
def modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module of features in the current folder."""
    (tmp_path / "own_features.py").write_text(MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "own_features", raising=False)
    return tmp_path


def on(name: str, head: str = "linear") -> OnFeatures:
    return on_features(f"own_features:{name}", head, (1, 8, 8), 10, 0)


@pytest.mark.parametrize(
    "name", ["centred", "statistics", "sticky", "remembering", "neighbour", "chance", "late"]
)
@pytest.mark.usefixtures("modules")
def test_features_that_depend_on_other_rows_are_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"the features 'own_features:{name}' of a record"):
        check_rows(on(name), f"own_features:{name}", (1, 8, 8))


@pytest.mark.usefixtures("modules")
def test_frozen_statistics_of_other_data_are_row_wise() -> None:
    model = on("conv")
    check_rows(model, "conv", (1, 8, 8))
    assert not any(p.requires_grad for p in model.features.parameters())
    assert not any(part.training for part in model.features.modules())


@pytest.mark.usefixtures("modules")
def test_features_as_wide_as_an_input_are_not_taken_for_one() -> None:
    model = on_features("own_features:flat", "linear", (5,), 3, 0)
    x = torch.rand(4, 5)
    assert model.shape == (1, 5)
    assert torch.equal(model(model.features(x)), model(x))
    assert model.features(x).std() == pytest.approx(1, abs=0.2)


@pytest.mark.parametrize("name", ["text", "raising"])
@pytest.mark.usefixtures("modules")
def test_what_makes_no_features_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=f"features 'own_features:{name}' r"):
        on(name)


@pytest.mark.usefixtures("modules")
def test_a_module_of_tokens_is_shown_tokens_alone() -> None:
    model = on("words")
    check_rows(model, "words", (1, 8, 8))
    assert (model.tokens, model.shape) == (9, (4,))
    with pytest.raises(ConfigError, match="features 'meeting_words' of a record"):
        check_rows(on("meeting_words"), "meeting_words", (1, 8, 8))
    with pytest.raises(ConfigError, match="token_ids = '9': give the size"):
        on("wrong_words")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("negative", "RuntimeError for random numbers of shape"),
        ("undeclared_words", "IndexError for random numbers of shape"),
        ("too_few_words", "IndexError for random tokens below 10 of shape"),
    ],
)
@pytest.mark.usefixtures("modules")
def test_a_module_that_raises_is_refused_in_one_line(name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=why) as refusal:
        check_rows(on(name), name, (1, 8, 8))
    assert "token_ids" in str(refusal.value)
    assert "\n" not in str(refusal.value)


@pytest.mark.usefixtures("modules")
def test_a_refusal_on_records_repeats_none_of_them() -> None:
    dataset, model = load("digits", None, 300, 50, 0), on("records_alone")
    check_rows(model, "records_alone", (1, 8, 8))
    dataset.x_train[7, 0, 3, 3] = 7777.0
    with pytest.raises(ConfigError, match="raised ValueError for a record") as refusal:
        with_features(dataset, model, "cpu", print)
    assert "7777" not in str(refusal.value)
    for wrong in (-1.0, 9.0, 0.5):
        tokens = replace(dataset, x_train=torch.full((3, 1, 8, 8), wrong))
        with pytest.raises(ConfigError, match="whole numbers from 0 to 8"):
            with_features(tokens, on("words"), "cpu", print)


@pytest.mark.usefixtures("modules")
def test_features_that_are_not_finite_are_refused() -> None:
    with pytest.raises(ConfigError, match="NaN or infinity"):
        prepare(run_of(Path("run"), features="own_features:not_finite"))


def run_of(out: Path, **changes: Any) -> TrainConfig:
    values = {"features": "own_features:conv", "train_size": 300, "steps": 4, "lot": 100}
    values |= {"recipe": "probe", "noise_multiplier": 1.0, "noise_seed": 5, "accountant": "rdp"}
    return TrainConfig(out=out, **values | changes)


def secrets_of(config: TrainConfig) -> Secrets:
    session = prepare(config.changed(out=None))
    found = [row.numpy() for row in session.train_data[0][:3]]
    assert session.train_data[0].shape == (300, 288)
    return Secrets(rows={"features": found})


def test_a_run_leaves_no_features_and_takes_inputs(modules: Path) -> None:
    config = run_of(modules / "run", feature_cache=modules / "cache")
    hidden = secrets_of(config)
    assert hidden.found_in((modules / "cache/digits.features").read_bytes())
    assert train(config, progress=press_at(2))["interrupted"]
    for file in (modules / "run").rglob("*"):
        assert not hidden.found_in(file.read_bytes()), file
        assert b"cache" not in file.read_bytes(), file
    with pytest.raises(ConfigError, match="--model own_features:conv"):
        resume(modules / "run")
    result = resume(modules / "run", model="own_features:conv")
    assert equal(weights(result), weights(train(config.changed(out=modules / "whole"))))
    for file in (modules / "run").rglob("*"):
        assert not hidden.found_in(file.read_bytes()), file
    with pytest.raises(ConfigError, match="--model own_features:conv"):
        vestige.load(modules / "run")
    model, test = vestige.load(modules / "run", "own_features:conv"), load("digits")
    right = (model(test.x_test).argmax(1) == test.y_test).float().mean()
    assert float(right) == pytest.approx(result["accuracy"])
    assert any("taken on trust" in caveat for caveat in result["caveats"])


@pytest.mark.usefixtures("modules")
def test_cached_features_are_private_and_fit_or_are_made_again(tmp_path: Path) -> None:
    path, model, heard = tmp_path / "cache/f", on("conv"), []
    dataset = load("digits", None, 60, 30, 0)
    made = with_features(dataset, model, "cpu", heard.append, path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700

    def times(data: Any, of: OnFeatures) -> int:
        heard.clear()
        found = with_features(data, of, "cpu", heard.append, path).features
        assert torch.allclose(found[0], of.features(data.x_train), atol=1e-6)
        return len(heard)

    assert times(dataset, model) == 0
    assert torch.equal(made.features[0], with_features(dataset, model, "cpu", print).features[0])
    other = probe(torch.nn.Linear(8, 36), "other", (1, 8, 8), lambda made: torch.nn.Linear(288, 2))
    assert other.shape == model.shape
    assert times(dataset, other) > 0  # of another module
    assert times(dataset, on("flat")) > 0  # of another width
    assert times(dataset, other) > 0
    assert times(replace(dataset, x_train=dataset.x_train + 1), other) > 0  # of other inputs
    path.write_bytes(b"nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        times(dataset, model)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"recipe": "probe"}, "recipe probe"),
        ({"feature_cache": Path("c")}, "feature_cache"),
        ({"features": "wrong"}, "unknown"),
        ({"features": "scatter", "model": "cnn"}, "model 'cnn'"),
        ({"features": "scatter", "model": "a:b"}, "model 'a:b'"),
        ({"features": "scatter", "model": "linear", "feature_cache": Path("r/c"), "out": Path("r")},
         "made to be published"),
        ({"features": "scatter", "model": "linear", "feature_cache": Path("runs")}, "published"),
    ],
)  # fmt: skip
def test_what_does_not_go_with_features_is_refused(given: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        TrainConfig(**given)


def test_views_do_not_go_with_features() -> None:
    config = TrainConfig(model="scatter", lot=50, steps=1, noise_multiplier=1.0, views=2)
    with pytest.raises(ConfigError, match="views 2"):
        prepare(config)
