"""One process in an nccl group of one: the releases are those of the process without a group.

CI has no GPU and skips.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.support.one_rank import one_rank, sharded_net
from tests.support.small_runs import closure_of, flat, net, private
from vestige.gradients.shards import is_sharded

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(not dist.is_nccl_available(), reason="needs a torch with nccl"),
]
DEVICE, STEPS = "cuda", 8
CASES = {
    "flat": {"method": "dp-sgd"},
    "per layer": {"method": "dp-sgd", "clipping": "per_layer"},
    "quantile": {"method": "dp-sgd", "clipping": "quantile"},
    "in pieces": {"method": "fo", "max_physical_batch_size": 2},
    "spectra": {"method": "sma"},
    "measured": {"method": "dp-is"},
    "in shards": {"method": "sma", "in_shards": True},
    "budget": {"method": "dp-sgd", "max_epsilon": 50.0, "delta": 1e-3},
}


def releases(method, in_shards=False, **options):
    """The values of every release and the weights after them; what was counted; the run's ranks."""
    given = sharded_net(device=DEVICE) if in_shards else net().to(DEVICE)
    engine, model, optimizer, loader = private(method, model=given, steps=STEPS, **options)
    engine.ranks.thorough = True
    seen = []
    while engine.released < STEPS:
        for x, y in loader:
            optimizer.step(closure_of(model, optimizer, x.to(DEVICE), y.to(DEVICE)))
            if len(seen) < engine.released:
                seen.append(engine.door.last[0].clone())
    counts = [engine.ledger.steps, engine.get_epsilon(1e-3)]
    weights = flat([p.full_tensor() if is_sharded(p) else p for p in model.parameters()])
    return [*seen, weights], counts, engine._run.ranks


@pytest.fixture(scope="module")
def grouped(tmp_path_factory):
    """Every case inside one group, whose sums go over nccl and whose key goes over gloo."""
    with one_rank(tmp_path_factory.mktemp("group"), "nccl"):
        every = {name: releases(**case) for name, case in CASES.items()}
        for _, _, ranks in every.values():
            assert dist.get_backend(ranks.group) == "nccl"
            assert dist.get_backend(ranks.cpu) == "gloo"
    return every


@pytest.mark.parametrize("name", CASES)
def test_a_group_of_one_changes_no_release(name, grouped):
    ours, expected, alone = releases(**CASES[name])
    theirs, counts, ranks = grouped[name]
    assert alone.group is None and ranks.world == 1
    assert counts == expected and len(theirs) == len(ours) == STEPS + 1
    for one, other in zip(ours, theirs, strict=True):
        assert float((one - other).abs().max()) <= 1e-12 * float(one.abs().max())
