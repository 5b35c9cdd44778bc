"""One process, and what a rank that does not lead has of its own; tests/ranks has the processes."""

from __future__ import annotations

import pytest
import torch

from tests.support.cut_runs import STEPS, config, cut_off, weights
from vestige.errors import ConfigError
from vestige.train import training
from vestige.train.config import TrainConfig
from vestige.train.ranks import joined, leads, written


def test_one_process_leads_and_joins_nobody(monkeypatch, tmp_path):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.delenv("RANK", raising=False)
    config = TrainConfig(out=tmp_path / "run")
    assert leads()
    with joined("cpu") as device, written(config) as own:
        assert device == "cpu" and own is config


def test_another_rank_writes_where_nobody_looks(monkeypatch, tmp_path):
    monkeypatch.setenv("RANK", "1")
    assert not leads()
    with written(TrainConfig(out=tmp_path / "run")) as own:
        thrown_away = own.out.parent
        assert thrown_away.is_dir() and not thrown_away.is_relative_to(tmp_path / "run")
        own.out.mkdir()
    assert not thrown_away.exists()


def started_again(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "1")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")


def test_processes_that_are_started_again_go_on_with_the_run(monkeypatch, tmp_path):
    folder = cut_off(tmp_path / "run", 7, monkeypatch)
    training.train(config(tmp_path / "straight"))
    with pytest.raises(ConfigError, match="in use"):
        config(folder)
    started_again(monkeypatch)
    with pytest.raises(ConfigError, match="in use by a run with other settings"):
        training.train(config(folder, lot=9))
    result = training.train(config(folder))
    assert result["steps"] == STEPS
    assert torch.equal(weights(folder), weights(tmp_path / "straight"))


def test_a_start_after_a_fault_must_find_its_run(monkeypatch):
    started_again(monkeypatch)
    with pytest.raises(ConfigError, match=r"--max-restarts 1 and no out: .* Name a folder"):
        training.train(config(None))
