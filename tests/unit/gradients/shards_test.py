"""What is in shards, and where a rank's part of it lies."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import checkpoint

from tests.support.one_rank import one_rank, sharded_net
from tests.support.small_runs import flat, net, private, run
from vestige.errors import PrivacyError, UnsupportedModel
from vestige.gradients.groups import partition
from vestige.gradients.shards import (
    dealt,
    fsdp_hooks,
    is_sharded,
    like_shard,
    managed,
    own_groups,
    own_part,
    own_places,
    whole,
)


@pytest.fixture
def model(tmp_path):
    with one_rank(tmp_path):
        yield sharded_net()


@pytest.mark.parametrize("count", range(1, 20))
@pytest.mark.parametrize("world", [1, 2, 3, 4, 7])
def test_rows_are_dealt_out_as_torch_shards_them(count, world):
    rows = torch.arange(count)
    chunks = rows.chunk(world)
    for rank in range(world):
        expected = chunks[rank] if rank < len(chunks) else rows[:0]
        assert rows[slice(*dealt(count, world, rank))].tolist() == expected.tolist()


def test_a_plain_model_has_no_shards():
    plain = net()
    groups = partition(plain, "flat")
    assert not any(map(is_sharded, plain.parameters()))
    assert managed(plain) == {}
    assert own_groups(groups) is groups and own_places(groups) is None
    weight = plain[0].weight
    assert torch.equal(own_part(weight), weight) and torch.equal(whole(weight), weight)
    assert like_shard(weight, weight) is weight


def test_parts_lie_in_the_flat_vector_where_the_parameters_do(model):
    groups = partition(model, "per_layer")
    own = own_groups(groups)
    assert all(map(is_sharded, model.parameters()))
    assert own.size == groups.size and own.segments() == groups.segments()
    assert own_places(groups).ranges == tuple((s.start, s.stop) for s in groups.slots)
    for slot, part in zip(groups.slots, own.slots, strict=True):
        assert part.trained is slot.parameter and not is_sharded(part.parameter)
        again = like_shard(part.parameter, slot.parameter)
        assert is_sharded(again) and torch.equal(whole(again), whole(slot.parameter))


def test_a_module_of_fsdp_has_its_own_parameters_alone(model):
    places = managed(model)
    assert list(places) == [model, model[0]]
    assert places[model] == [(model[2], "weight"), (model[2], "bias")]
    assert places[model[0]] == [(model[0], "weight"), (model[0], "bias")]


def test_fsdp_gets_its_hooks_back(model):
    before = [hook for part in (model, model[0]) for *_, hook in fsdp_hooks(part)]
    engine, *_ = private("dp-sgd", model=model)
    during = [hook for part in (model, model[0]) for *_, hook in fsdp_hooks(part)]
    assert len(during) == len(before) == 4 and not set(during) & set(before)
    engine.detach()
    assert [hook for part in (model, model[0]) for *_, hook in fsdp_hooks(part)] == before


class Blocks(nn.Module):
    """Two blocks, which a checkpointed model runs again in the backward pass, and a head."""

    def __init__(self, again):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(2))
        self.head, self.again = nn.Linear(5, 3), again

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return self.head(x)


def trained(again=False, shard=True, **precision):
    """The weights after three steps."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = Blocks(again).double()
    if shard:
        for block in made.blocks:
            fully_shard(block, mp_policy=MixedPrecisionPolicy(**precision))
        whole_output = {"output_dtype": torch.float64} if precision else {}
        fully_shard(made, mp_policy=MixedPrecisionPolicy(**precision, **whole_output))
    engine, *rest = private("fo", model=made)
    run(engine, *rest, 3)
    return flat(map(whole, made.parameters()))


def test_checkpointed_blocks_are_gathered_for_their_second_run(tmp_path):
    with one_rank(tmp_path):
        expected = trained(shard=False)
        assert torch.equal(trained(), expected)
        assert torch.equal(trained(again=True), expected)


def test_weights_that_fsdp_casts_are_still_the_parameters(tmp_path):
    with one_rank(tmp_path):
        expected, found = trained(shard=False), trained(param_dtype=torch.bfloat16)
    assert 0 < float((found - expected).norm()) < 0.02 * float(expected.norm())


class Mixing(nn.Module):
    """Rows meet in a mean over the batch, between two layers in shards."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x):
        x = self.first(x)
        return self.last(x - x.mean(0))


@pytest.mark.parametrize("self_check", [False, True])
def test_rows_that_meet_between_shards_are_refused(self_check, tmp_path):
    with one_rank(tmp_path):
        mixing = Mixing().double()
        fully_shard(mixing.first)
        fully_shard(mixing)
        engine, *rest = private("dp-sgd", model=mixing, self_check=self_check)
        with pytest.raises((PrivacyError, UnsupportedModel)):
            run(engine, *rest, 1)
        assert engine.released == 0


@pytest.mark.parametrize("place", [0, 2])
def test_a_gradient_that_goes_around_the_rules_is_refused(place, model):
    """The first layer is in shards again after the forward pass, the last is still gathered."""
    _, model, _, loader = private("dp-sgd", model=model, self_check=False)
    x, y = next(iter(loader))
    loss = nn.functional.cross_entropy(model(x), y)
    weight = model[place].weight
    assert is_sharded(weight) is (place == 0)
    square = (weight.full_tensor() if is_sharded(weight) else weight).square().sum()
    with pytest.raises(
        UnsupportedModel, match=f"'{place}.weight' received a gradient that was not"
    ):
        (loss + square).backward()
