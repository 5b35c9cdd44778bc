"""What a model in shards is refused for; the whole list is walked in tests/ranks/fsdp_test.py."""

from __future__ import annotations

import pytest
import torch

from tests.support.one_rank import one_rank, sharded_net
from tests.support.small_runs import private
from vestige.errors import ConfigError, UnsupportedModel
from vestige.updates.adam import AdamBC


@pytest.fixture(autouse=True)
def group(tmp_path):
    with one_rank(tmp_path):
        yield


@pytest.mark.parametrize(
    "method, options, reason",
    [
        ("dp-sam", {}, "looks at a batch twice"),
        ("kalman", {}, "keeps a filter over whole releases"),
        ("dp-sgd", {"denoiser": "doppler"}, "denoiser='doppler' keeps copies"),
        ("dp-sgd", {"averaging": "ema"}, "averaging='ema' keeps copies"),
        ("dp-sgd", {"optimizer": AdamBC}, "AdamBC corrects whole parameters"),
    ],
)
def test_what_needs_whole_parameters_says_why(method, options, reason):
    with pytest.raises(ConfigError, match=f"trained in shards, and .*{reason}.* ignored_params"):
        private(method, model=sharded_net(), **options)


def test_a_shard_that_nobody_gathers_is_refused():
    model, other = torch.nn.Linear(5, 3).double(), sharded_net()
    model.weight = other[2].weight
    with pytest.raises(UnsupportedModel, match="'weight' is a DTensor that no fully_shard manages"):
        private("dp-sgd", model=model)


def test_the_older_form_is_refused():
    inner, device = torch.nn.Linear(5, 3).double(), torch.device("cpu")
    wrapped = torch.distributed.fsdp.FullyShardedDataParallel(inner, device_id=device)
    with pytest.raises(UnsupportedModel, match="wrapped in FullyShardedDataParallel"):
        private("dp-sgd", model=wrapped)
