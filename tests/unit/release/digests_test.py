"""A run in test mode that goes on is compared with what it released before."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.support.cut_runs import STEPS, charged, config, cut_off, weights
from vestige import PrivacyError
from vestige.train import training

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_what_was_compared_is_not_charged_twice(tmp_path, monkeypatch):
    """Steps 9 and 10 were released before the crash: the same digest, the same charge."""
    cut_off(tmp_path / "cut", 10, monkeypatch)
    before = charged(tmp_path / "cut")
    assert before == 11
    result = training.resume(tmp_path / "cut")
    assert charged(tmp_path / "cut") == STEPS
    assert result["lost_releases"] == 0


def test_a_replay_that_differs_stops(tmp_path, monkeypatch):
    """The same noise over another sum would reveal the difference."""
    values = np.random.default_rng(0).normal(size=(60, 8)).astype(np.float32)
    labels = np.arange(60) % 3
    for name, first in (("data", 0.0), ("other", 5.0)):
        changed = values.copy()
        changed[:20] += first
        (tmp_path / name).mkdir()
        np.savez(
            tmp_path / name / "d.npz",
            x_train=changed, y_train=labels, x_test=values, y_test=labels, classes=3,
        )  # fmt: skip
    changes = {"train_size": None, "test_size": None, "dataset": "d.npz"}
    monkeypatch.chdir(tmp_path / "data")
    cut_off(tmp_path / "cut", 10, monkeypatch, **changes)
    monkeypatch.chdir(tmp_path / "other")
    with pytest.raises(PrivacyError, match=r"release 9 differs from the one.*reveal"):
        training.resume(tmp_path / "cut")
    monkeypatch.chdir(tmp_path / "data")
    assert training.resume(tmp_path / "cut")["steps"] == STEPS


def test_a_replay_does_not_count_against_the_budget(tmp_path, monkeypatch):
    whole = training.train(config(tmp_path / "whole", steps=40, max_epsilon=6.0))
    cut_off(tmp_path / "cut", whole["steps"] - 1, monkeypatch, steps=40, max_epsilon=6.0)
    result = training.resume(tmp_path / "cut")
    assert result["budget_spent"]
    assert result["steps"] == whole["steps"]
    assert torch.equal(weights(tmp_path / "cut"), weights(tmp_path / "whole"))
