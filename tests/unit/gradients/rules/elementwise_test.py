"""Parameters that are added or multiplied: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.reference import captured_sum, check_sum_of_zoo, clip_and_sum, loop_gradients
from tests.support.zoo import BY_RULE
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["elementwise"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)


class Repeated(nn.Module):
    """A bias for every head, repeated for every row, with the heads folded into the rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.bias = nn.Linear(3, 3), nn.Parameter(torch.randn(1, 2, 3))

    def forward(self, x):
        bias = self.bias.repeat(len(x), 1, 1).view(2 * len(x), 3)
        return (self.layer(x).flatten(0, 1) + bias).unflatten(0, (len(x), 2))


@pytest.mark.parametrize("rows", [1, 5])
def test_what_is_repeated_can_be_viewed(rows):
    torch.manual_seed(0)
    model = Repeated().double()
    x, cotangent = torch.randn(rows, 2, 3).double(), torch.randn(rows, 2, 3).double()
    groups = partition(model, "flat")
    expected = clip_and_sum(loop_gradients(model, x, cotangent, groups), groups, Clip((1.0,)))
    got, watch = captured_sum(model, x, cotangent)
    assert (got - expected).norm() <= 1e-9 * expected.norm() and not watch.runs_row_by_row()


@pytest.mark.parametrize("rows", [1, 3])
def test_a_learned_state_for_all_rows_of_a_batch_of_one_too(rows):
    """(layers, 1, hidden) expanded to the batch: nothing grows where there is one row."""

    class Started(nn.Module):
        def __init__(self):
            super().__init__()
            self.start = nn.Parameter(torch.randn(2, 1, 4))
            self.gru = nn.GRU(3, 4, num_layers=2, batch_first=True)

        def forward(self, x):
            return self.gru(x, self.start.expand(2, len(x), 4).contiguous())[0][:, -1]

    torch.manual_seed(0)
    model, x = Started().double(), torch.randn(rows, 5, 3).double()
    groups = partition(model, "flat")
    cotangent = torch.randn(rows, 4).double()
    gradients = loop_gradients(model, x, cotangent, groups)
    expected = clip_and_sum(gradients, groups, Clip.over(0.5, groups.names))
    got, _ = captured_sum(model, x, cotangent, "flat", 0.5)
    assert (got - expected).norm() <= 1e-9 * expected.norm()
