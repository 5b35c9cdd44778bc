"""Small runs, their neighbours, and runs that are resumed."""

from __future__ import annotations

import pytest
import torch

from vestige import ConfigError
from vestige.audit.verify.runs import LOUD, Setting, neighbour, observe, records, small_run
from vestige.methods import (
    DPFTRL,
    DPSGD,
)
from vestige.plan import ADJACENCY


def test_an_observation_repeats_with_its_seed_and_not_without():
    first, second, other = (observe(DPSGD(), steps=4, seed=s).whole.looks for s in (3, 3, None))
    assert first[3].values.equal(second[3].values)
    assert not first[3].values.equal(other[3].values)


def test_the_resumed_run_shares_its_past_and_nothing_else():
    seen = observe(DPSGD(), steps=8, seed=3)
    assert len(seen.whole.looks) == 8 and len(seen.resumed.looks) == 4
    later = [look for look in seen.whole.looks if look.step >= 4]
    for ours, theirs in zip(later, seen.resumed.looks, strict=True):
        assert (ours.step, ours.lot) == (theirs.step, theirs.lot)
        assert not ours.noise.equal(theirs.noise)
    assert seen.forgotten == 0


def test_the_neighbour_is_the_one_that_the_adjacency_says():
    setting = Setting(size=30)
    data = records(setting)
    x, y, silent, _ = data.tensors
    assert len(data) == 30 and float(x[-1].norm()) > LOUD  # about sqrt(6) times as much
    fewer = neighbour(data, DPSGD())
    assert len(fewer) == 30 - 1 and torch.equal(fewer.tensors[0], x[:-1])
    zeroed = neighbour(data, DPFTRL())
    assert torch.equal(zeroed.tensors[0], x) and torch.equal(zeroed.tensors[1], y)
    assert zeroed.tensors[2].nonzero().tolist() == [[30 - 1]] and not silent.any()

    class Strange(DPSGD):
        adjacency = "swap two records"

    assert DPSGD().adjacency == ADJACENCY
    with pytest.raises(ConfigError, match="swap two records"):
        small_run(Strange(), data, setting)
