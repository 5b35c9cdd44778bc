"""Averages of iterates: against their definitions, with every method, saved and loaded."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.small_runs import flat, net, private, run
from vestige import ConfigError
from vestige.plan import AVERAGES
from vestige.train.config import TrainConfig
from vestige.train.training import train
from vestige.updates import averaging


def expected(kind, path):
    """The average of the iterates theta_1 .. theta_T, from weights that sum to 1."""
    steps = len(path)
    t = np.arange(1, steps + 1)
    if kind.startswith("ema"):
        decay = float(kind[4:] or 0.99)
        weights = np.where(t == 1, 1.0, 1 - decay) * decay ** (steps - t)
    elif kind == "uniform-tail":
        weights = (t > steps // 2) / (steps - steps // 2)
    else:
        weights = np.ones(steps)
        for i in range(steps):
            new = (averaging.ORDER + 1) / (t[i] + averaging.ORDER)
            weights[:i] *= 1 - new
            weights[i] = new
        # A power law: the weight of iterate t grows like t^order.
        assert weights[-1] / weights[steps // 2 - 1] == pytest.approx(2**averaging.ORDER, rel=0.35)
    assert weights.sum() == pytest.approx(1.0)
    return sum(float(w) * theta for w, theta in zip(weights, path, strict=True))


@pytest.mark.parametrize("kind", [*AVERAGES, "ema:0.9"])
def test_an_average_is_what_its_name_says(kind):
    engine, model, optimizer, loader = private("dp-sgd", averaging=kind, steps=20)
    path = []
    run(engine, model, optimizer, loader, 20, lambda: path.append(flat(model.parameters()).clone()))
    found = engine.averaged_state_dict()
    assert list(found) == list(model.state_dict())
    assert torch.allclose(flat(found.values()), expected(kind, path), atol=1e-12)
    assert torch.equal(flat(model.parameters()), path[-1])


def test_physical_batches_count_once_per_lot():
    engine, *rest = private("dp-sgd", averaging="fractional", max_physical_batch_size=2)
    run(engine, *rest, 5)
    assert engine.parts["averaging"].count == 5


def test_averages_are_saved_and_continue():
    whole = private("fo", averaging="ema")
    run(*whole, 9)
    engine, model, optimizer, loader = private("fo", averaging="ema")
    run(engine, model, optimizer, loader, 4)
    state = engine.state_dict(), model.state_dict(), optimizer.state_dict()
    other, again, optimizer, loader = private("fo", averaging="ema")
    with pytest.raises(ConfigError, match="saved average does not fit"):
        other.load_state_dict(state[0] | {"averaging": None})
    other.load_state_dict(state[0])
    again.load_state_dict(state[1])
    optimizer.load_state_dict(state[2])
    run(other, again, optimizer, loader, 5)
    ours, theirs = other.averaged_state_dict(), whole[0].averaged_state_dict()
    assert all(torch.equal(ours[k], theirs[k]) for k in theirs)


def test_what_cannot_be_averaged_is_refused():
    with pytest.raises(ConfigError, match="averaging='mode' is unknown: choose one of ema"):
        private("dp-sgd", averaging="mode")
    for wrong in ("ema:2", "ema:x", "ema:nan", "fractional:0.5"):
        with pytest.raises(ConfigError, match=f"averaging='{wrong}' .*ema:0.999"):
            private("dp-sgd", averaging=wrong)
        with pytest.raises(ConfigError, match=f"averaging='{wrong}' .*ema:0.999"):
            TrainConfig(averaging=wrong)
    with pytest.raises(ConfigError, match="pass steps="):
        private("dp-sgd", averaging="uniform-tail")
    engine, *_ = private("dp-sgd", averaging="ema")
    with pytest.raises(ConfigError, match="no average of the weights yet"):
        engine.averaged_state_dict()
    engine, *rest = private("dp-sgd")
    run(engine, *rest, 1)
    with pytest.raises(ConfigError, match="no average of the weights yet"):
        engine.averaged_state_dict()


def test_low_precision_weights_are_averaged_in_float32():
    model = net().bfloat16()
    means = averaging.Averaging("ema", dict(model.named_parameters()), None)
    for _ in range(300):
        means.stepped()
    found = means.averaged()
    for parameter in model.parameters():
        assert found[id(parameter)].dtype == torch.bfloat16
        assert torch.equal(found[id(parameter)], parameter)


def test_the_command_line_measures_and_saves_the_average(tmp_path):
    config = TrainConfig(epochs=2, averaging="ema", noise_seed=1, out=tmp_path / "r", method="sma")
    result = train(config)
    assert 0 < result["averaged_accuracy"] < 1 and result["averaged_loss"] > 0
    folder = tmp_path / "r"
    last = torch.load(folder / "model.pt", weights_only=True)
    mean = torch.load(folder / "model_averaged.pt", weights_only=True)
    assert list(last) == list(mean)
    assert not all(torch.equal(last[k], mean[k]) for k in last)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["averaged_test_accuracy"] == result["averaged_accuracy"]
    plain = train(TrainConfig(epochs=2, noise_seed=1, out=tmp_path / "p", method="sma"))
    assert plain["accuracy"] == result["accuracy"]


def test_tied_weights_are_averaged_under_all_their_names():
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3)).double()
    model[2].weight = model[0].weight
    engine, model, *rest = private("dp-sgd", model=model, averaging="ema")
    run(engine, model, *rest, 5)
    found = engine.averaged_state_dict()
    assert torch.equal(found["0.weight"], found["2.weight"])
    assert not torch.equal(found["0.weight"], model[0].weight)
