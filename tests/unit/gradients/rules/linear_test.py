"""Products with a weight matrix: the clipped sum equals a loop over single examples."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.reference import captured_sum, check_sum_of_zoo
from tests.support.zoo import BY_RULE
from vestige import UnsupportedModel


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", BY_RULE["linear"])
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    check_sum_of_zoo(name, clipping, physical)


@pytest.mark.parametrize("function", [torch._grouped_mm, F.grouped_mm])
def test_products_of_tokens_sorted_by_expert_are_refused_with_the_remedy(function):
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(2, 16, 16))

        def forward(self, x):
            return function(x, self.weight, offs=torch.tensor([2, 5], dtype=torch.int32))

    with pytest.raises(UnsupportedModel, match=r"'weight'.*experts.*'batched_mm'"):
        captured_sum(Experts(), torch.randn(5, 16), torch.randn(5, 16))
