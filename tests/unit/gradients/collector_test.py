"""Clipped sums equal a loop over single examples, for every rule and both clipping modes."""

from __future__ import annotations

import pytest
import torch

from tests.support.reference import call, captured_sum, clip_and_sum, loop_gradients
from tests.support.zoo import cast, zoo
from vestige.gradients.clipping import Clip
from vestige.gradients.collector import Collector
from vestige.gradients.groups import partition
from vestige.gradients.rules.convolution import Geometry


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


def _tf32(values):
    """Rounded to ten bits of mantissa, as a GPU rounds the factors of a TF32 product."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_positions_that_cancel_stay_within_the_bound_under_tf32(spread, monkeypatch):
    """The sum rounds its factors, and what is left of terms that cancel is rounding error."""
    exact = Geometry.weight_gradient
    monkeypatch.setattr(
        Geometry, "weight_gradient", lambda self, x, g, w: exact(self, _tf32(x), _tf32(g), w)
    )
    model = torch.nn.Conv2d(64, 64, 3, bias=False)
    step = 2.0**-11
    g = torch.zeros(1, 64, 4, 4)
    g[:, :, :2], g[:, :, 2:] = 1 + 0.5 * spread * step, -(1 - 0.5 * spread * step)
    largest = {}
    for rounding in (2.0**-9, 4 * torch.finfo(torch.float32).eps):
        monkeypatch.setattr(Collector, "_rounding", lambda _, r=rounding: r)
        sums = [
            captured_sum(model, torch.full((1, 64, 6, 6), 1 + k / 100), g, bounds=1.0)[0].norm()
            for k in range(100)
        ]
        largest[rounding] = float(max(sums))
    assert largest[2.0**-9] <= 1 + 1e-6
    if spread == 0.5:
        assert largest[4 * torch.finfo(torch.float32).eps] > 1.2  # where nobody knows of it
