"""One trial: what it hands out is a function of its own key, and it is silent."""

from __future__ import annotations

import logging
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.support.searches import search
from vestige.engine.privacy_engine import PrivacyEngine
from vestige.errors import ConfigError
from vestige.train import models
from vestige.train.tune import trial
from vestige.train.tune.prepared import planned
from vestige.train.tune.trial import Setup


def setup_of(tmp_path: Path, **options: object) -> Setup:
    asked = search(**options)
    return planned(asked.base, asked.candidates, asked.law, tmp_path / "l", lambda _: None).setups[
        0
    ]


def test_a_trial_is_a_function_of_its_key(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    one, other, again = (trial.run(setup, seed, lambda: False) for seed in (1, 2, 1))
    fresh = trial.run(setup, None, lambda: False)
    assert one and other and again and fresh
    assert one == again and one.weights != other.weights != fresh.weights
    assert trial.run(setup, 1, lambda: True) is None


def test_a_noisy_score_is_its_own_noise_on_the_same_weights(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    noisy = replace(setup, held_out_noise=20.0)
    exact, first, again = (trial.run(s, 1, lambda: False) for s in (setup, noisy, noisy))
    assert exact and first and again
    assert exact.weights == first.weights and exact.score != first.score == again.score


def test_with_averages_the_average_is_scored_and_kept(tmp_path: Path) -> None:
    outcome = trial.run(setup_of(tmp_path, averaging="ema:0.5", steps=4), 1, lambda: False)
    assert outcome and set(outcome.weights) == {"model.pt", "model_averaged.pt"}
    assert outcome.score == outcome.result["averaged_accuracy"]


def test_trials_train_on_tensors_of_their_own(tmp_path: Path) -> None:
    setup = setup_of(tmp_path)
    outcomes = [trial.run(setup, seed, lambda: False) for seed in (1, 2)]
    assert outcomes[0] and outcomes[1]
    assert outcomes[0].caveats == outcomes[1].caveats
    with_features = replace(setup.dataset, features=(torch.ones(3), torch.ones(2)))
    own = trial.own_tensors(with_features)
    assert own.features and own.features[0] is not with_features.features[0]


def test_nothing_is_printed_warned_of_or_logged_meanwhile(
    capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with warnings.catch_warnings(record=True) as warned:
        with trial.silence():
            print("one")
            print("two", file=sys.stderr)
            warnings.warn("three", stacklevel=1)
            logging.getLogger("any").critical("four")
        assert not warned
    assert capfd.readouterr() == ("", "") and not caplog.records
    logging.getLogger("any").warning("five")
    assert len(caplog.records) == 1


FACTORY = """
import functools
import torch

@functools.cache
def make(shape, classes):  # the same module each time, as of a backbone that is loaded once
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, classes))
"""


def test_a_module_that_a_factory_hands_out_again_is_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "kept_module.py").write_text(FACTORY)
    monkeypatch.syspath_prepend(tmp_path)
    setup = setup_of(tmp_path, model="kept_module:make")
    first, again = (trial.run(setup, 1, lambda: False) for _ in range(2))
    assert first and first == again and not first.failure
    module = models.build("kept_module:make", (1, 8, 8), 10, 0)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    data = torch.utils.data.TensorDataset(torch.randn(20, 1, 8, 8), torch.randint(10, (20,)))
    engine = PrivacyEngine()
    _, _, loader = engine.make_private(
        module=module,
        optimizer=optimizer,
        data_loader=torch.utils.data.DataLoader(data, batch_size=10),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for x, y in loader:
        torch.nn.functional.cross_entropy(module(x), y).backward()
        optimizer.step()
    engine.detach()
    with pytest.raises(ConfigError, match="another run of this process has trained"):
        setup_of(tmp_path, model="kept_module:make")
    sys.modules.pop("kept_module")
