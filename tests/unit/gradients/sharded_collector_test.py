"""Sums of parameters in shards: the same as of whole ones, shared in one order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.one_rank import one_rank, sharded_net
from tests.support.small_runs import net, private
from vestige.gradients.collector import Collector
from vestige.gradients.sharded_collector import ShardedCollector


def collected(model, clipping, skip=False):
    """The collector after one backward pass, and the shapes that were shared."""
    engine, model, _, loader = private("dp-sgd", model=model, clipping=clipping, self_check=False)
    collector, shared = engine._run.capture.collector, []
    if isinstance(collector, ShardedCollector):
        collector.share = lambda sums: shared.append(tuple(sums.shape)) or sums
    x, y = next(iter(loader))
    out = model(x)
    (F.cross_entropy(out, y) * (0 if skip else 1)).backward()
    return collector, shared


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_sum_is_that_of_whole_parameters_one_by_one(clipping, tmp_path):
    with one_rank(tmp_path):
        sharded = sharded_net()
        plain = net()
        for ours, theirs in zip(plain, sharded, strict=True):
            if hasattr(ours, "weight"):
                ours.weight.data = theirs.weight.full_tensor().clone()
                ours.bias.data = theirs.bias.full_tensor().clone()
        found, shared = collected(sharded, clipping)
        expected, _ = collected(plain, clipping)
    assert type(expected) is Collector and type(found) is ShardedCollector
    assert torch.allclose(found.total, expected.total, rtol=1e-12, atol=0)
    assert found.total.abs().max() > 0
    assert shared == [(7, 5), (7,), (3, 7), (3,)]


def test_what_has_no_gradient_is_shared_all_the_same(tmp_path):
    """The order of messages must not follow from what a rank's rows happen to use."""
    with one_rank(tmp_path):
        found, shared = collected(sharded_net(), "flat", skip=True)
    assert not found.total.any()
    assert shared == [(7, 5), (7,), (3, 7), (3,)]
