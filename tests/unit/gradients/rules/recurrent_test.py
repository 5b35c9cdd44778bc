"""Recurrent layers: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pack_sequence
from torch.utils.data import TensorDataset

from tests.support.loops import epoch, private
from tests.support.reference import captured_sum, check_sum_of_zoo
from tests.support.zoo import BY_RULE, zoo
from vestige import UnsupportedModel


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["recurrent"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)


class Packing(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, lengths):
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        state = self.layer(packed)[1]
        return (state[0] if isinstance(state, tuple) else state)[-1]


class Packed(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, data, sizes):
        packed = torch.nn.utils.rnn.PackedSequence(data, sizes)
        return self.layer(packed)[0].data


REMEDY = r"PackedSequence.*padded rows.*lengths - 1"


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_packed_sequence_is_refused_with_the_remedy(kind):
    x, lengths = torch.randn(5, 6, 3), torch.tensor([6, 2, 4, 3, 5])
    with pytest.raises(UnsupportedModel, match=REMEDY):
        captured_sum(Packing(kind(3, 4)), (x, lengths), torch.randn(5, 4))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_a_sequence_that_was_packed_outside_is_refused(kind):
    packed = pack_sequence([torch.randn(n, 3) for n in (4, 3, 3, 1)])
    with pytest.raises(UnsupportedModel, match=REMEDY):
        captured_sum(Packed(kind(3, 4)), (packed.data, packed.batch_sizes), torch.randn(11, 4))


@pytest.mark.parametrize("name", ["lstm cell", "gru cell", "lstm with projections"])
def test_cells_and_projections_pass_the_self_check(name):
    layer, _, pick = zoo()[name]

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x):
            return pick(self.layer(x)).flatten(1)[:, :3]

    data = TensorDataset(torch.randn(24, 5, 3), torch.randint(0, 3, (24,)))
    engine, model, optimizer, loader = private(Model(), data)
    epoch(model, optimizer, loader)
    assert engine.released == len(loader)
