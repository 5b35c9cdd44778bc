"""One process, and what a rank that does not lead has of its own; tests/ranks has the processes."""

from __future__ import annotations

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
