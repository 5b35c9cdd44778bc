"""Embeddings: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.support.loops import epoch, private
from tests.support.reference import captured_sum, check_sum_of_zoo
from tests.support.zoo import BY_RULE
from vestige import UnsupportedModel


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["embedding"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.bag = nn.EmbeddingBag(7, 3)

    def forward(self, indices, offsets):
        return self.bag(indices, offsets)


def test_a_bag_with_offsets_is_refused_with_the_remedy():
    given = torch.randint(0, 7, (6,)), torch.tensor([0, 1, 2, 2, 4, 5])
    with pytest.raises(
        UnsupportedModel, match=r"'bag\.weight'.*offsets.*\(rows, positions\).*padd"
    ):
        captured_sum(Flat(), given, torch.randn(6, 3))


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}])
def test_a_bag_whose_rows_depend_on_others_is_refused(option):
    with pytest.raises(UnsupportedModel, match=next(iter(option))):
        captured_sum(nn.EmbeddingBag(7, 3, **option), torch.randint(0, 7, (4, 5)), torch.ones(4, 3))


@pytest.mark.parametrize("mode", ["mean", "sum"])
def test_a_bag_with_padding_passes_the_self_check(mode):
    data = TensorDataset(torch.randint(0, 7, (24, 5)), torch.randint(0, 3, (24,)))
    model = nn.Sequential(nn.EmbeddingBag(7, 4, mode=mode, padding_idx=0), nn.Linear(4, 3))
    engine, model, optimizer, loader = private(model, data)
    epoch(model, optimizer, loader)
    assert engine.released == len(loader)
    assert not any("self-check was skipped" in caveat for caveat in engine.caveats())


def test_a_bag_is_not_run_row_by_row():
    """That would take a table for every row."""
    model = nn.Sequential(nn.EmbeddingBag(7, 3, padding_idx=0))
    _, watch = captured_sum(model, torch.randint(0, 7, (4, 5)), torch.ones(4, 3))
    assert not watch.runs_row_by_row()
