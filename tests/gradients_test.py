"""Clipped sums equal a loop over single examples, for every rule and both clipping modes."""

from __future__ import annotations

import pytest
import torch

from tests.reference import call, captured_sum, clip_and_sum, loop_gradients
from tests.zoo import zoo
from vestige.clipping import Clip
from vestige.groups import partition


def cast(x, dtype):
    if isinstance(x, tuple):
        return tuple(cast(t, dtype) for t in x)
    return x.to(dtype) if x.is_floating_point() else x


@pytest.mark.parametrize("physical", [1, 7, None])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", list(zoo()))
def test_clipped_sum_equals_a_loop_over_examples(name, clipping, physical):
    for dtype, tolerance in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        model, x, pick = zoo()[name]
        model, x = model.to(dtype), cast(x, dtype)
        groups = partition(model, clipping)
        cotangent = torch.randn_like(pick(call(model, x)))
        gradients = loop_gradients(model, x, cotangent, groups, pick=pick)
        bound = float(gradients.norm(dim=1).median())  # about half of the examples are clipped
        expected = clip_and_sum(gradients, groups, Clip.over(bound, groups.names))
        got, _ = captured_sum(model, x, cotangent, clipping, bound, physical, pick=pick)
        assert got.dtype == dtype
        assert (got - expected).norm() <= tolerance * expected.norm()
