"""Shards become whole tensors in a checkpoint, and shards again."""

from __future__ import annotations

import torch

from tests.support.one_rank import one_rank, sharded_net
from tests.support.small_runs import private, run
from vestige.engine.sharded_state import (
    gathered,
    own_history,
    own_optimizer_state,
    scattered,
    whole_history,
)
from vestige.gradients.groups import partition
from vestige.gradients.shards import is_sharded


def test_a_model_comes_back_in_shards(tmp_path):
    with one_rank(tmp_path):
        model = sharded_net()
        state = gathered(model.state_dict())
        assert not any(map(is_sharded, state.values()))
        again = scattered(state, model.state_dict())
        assert all(map(is_sharded, again.values()))
        assert all(torch.equal(again[k].full_tensor(), v) for k, v in state.items())


def test_an_optimizer_gets_shards_where_its_parameters_are_in_shards(tmp_path):
    with one_rank(tmp_path):
        engine, *rest = private("dp-adam", model=sharded_net(), self_check=False)
        run(engine, *rest, 2)
        optimizer = rest[1]
        saved = gathered(optimizer.state_dict())
        assert not is_sharded(saved["state"][0]["exp_avg"])
        ours = own_optimizer_state(saved, optimizer)
        assert is_sharded(ours["state"][0]["exp_avg"])
        assert not is_sharded(ours["state"][0]["step"])  # a number


def test_past_releases_are_cut_and_put_together(tmp_path):
    with one_rank(tmp_path):
        groups = partition(sharded_net(), "flat")
        ring = torch.randn(3, groups.size)
        state = {"memory": {"history": {"ring": ring, "trend": ring[0], "count": 3}, "noise": None}}
        for change in (own_history, whole_history):
            changed = change(state, groups)["memory"]
            assert torch.equal(changed["history"]["ring"], ring)
            assert torch.equal(changed["history"]["trend"], ring[0])
            assert changed["history"]["count"] == 3
        assert own_history({"memory": 1}, groups) == {"memory": 1}  # refused by the memory
        assert own_history({}, groups) == {}
