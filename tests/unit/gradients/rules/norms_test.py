"""Normalisation layers: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.reference import captured_sum, check_sum_of_zoo, clip_and_sum, loop_gradients
from tests.support.zoo import BY_RULE
from vestige import UnsupportedModel
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["norms"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)


class Standardised(nn.Conv2d):
    """A convolution whose weight is normalised, by the function that normalises batches."""

    def forward(self, x):
        flat = self.weight.reshape(1, self.out_channels, -1)
        weight = F.batch_norm(flat, None, None, training=True).reshape_as(self.weight)
        return F.conv2d(x, weight, self.bias)


def test_a_weight_may_be_normalised_by_batch_norm():
    torch.manual_seed(0)
    model = nn.Sequential(Standardised(2, 3, 2), nn.ReLU(), Standardised(3, 2, 2)).double()
    x, cotangent = torch.randn(5, 2, 4, 4).double(), torch.randn(5, 2, 2, 2).double()
    groups = partition(model, "flat")
    gradients = loop_gradients(model, x, cotangent, groups)
    bound = float(gradients.norm(dim=1).median())
    expected = clip_and_sum(gradients, groups, Clip((bound,)))
    got, _ = captured_sum(model, x, cotangent, bounds=bound)
    assert (got - expected).norm() <= 1e-9 * expected.norm()


def test_rows_may_not():
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(3, 4)

        def forward(self, x):
            return F.batch_norm(self.layer(x), None, None, training=True)

    with pytest.raises(UnsupportedModel, match="batch_norm mixes"):
        captured_sum(Mixing(), torch.randn(5, 3), torch.randn(5, 4))
