"""The collector: what a sum loses to rounding stays within the bound."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import captured_sum
from vestige import PrivacyEngine
from vestige.gradients.collector import Collector
from vestige.gradients.rules.convolution import Geometry


def _tf32(values):
    """Rounded to ten bits of mantissa, as a GPU rounds the factors of a TF32 product."""
    bits = values.contiguous().view(torch.int32)
    return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)


def _bf16(values):
    """Rounded to seven bits, as a CPU rounds them where `fp32_precision` is "bf16"."""
    return values.bfloat16().float()


@pytest.mark.parametrize(
    "rounded, step, coarse", [(_tf32, 2.0**-11, 2.0**-9), (_bf16, 2.0**-8, 2.0**-6)]
)
@pytest.mark.parametrize("spread", [0.1, 0.5, 1.0])
def test_positions_that_cancel_stay_within_the_bound(spread, rounded, step, coarse, monkeypatch):
    """The sum rounds its factors, and what is left of terms that cancel is rounding error."""
    exact = Geometry.weight_gradient
    monkeypatch.setattr(
        Geometry, "weight_gradient", lambda self, x, g, w: exact(self, rounded(x), rounded(g), w)
    )
    model = torch.nn.Conv2d(64, 64, 3, bias=False)
    g = torch.zeros(1, 64, 4, 4)
    g[:, :, :2], g[:, :, 2:] = 1 + 0.5 * spread * step, -(1 - 0.5 * spread * step)
    largest = {}
    for rounding in (coarse, 4 * torch.finfo(torch.float32).eps):
        monkeypatch.setattr(Collector, "_rounding", lambda _, r=rounding: r)
        sums = [
            captured_sum(model, torch.full((1, 64, 6, 6), 1 + k / 100), g, bounds=0.05)[0].norm()
            for k in range(100)
        ]
        largest[rounding] = float(max(sums)) / 0.05
    assert largest[coarse] <= 1 + 1e-6
    if spread == 0.5:
        assert largest[4 * torch.finfo(torch.float32).eps] > 1.2  # where nobody knows of it


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_one_operation_that_uses_a_parameter_twice_is_one_contribution(clipping):
    """The bias of F.linear is a column of its weight: both parts add up before the clip."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 6))

        def forward(self, x):
            return F.linear(x, self.weight, self.weight[:, 0])

    torch.manual_seed(0)
    model, x = Twice(), torch.randn(1, 6) + 3
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    _, _, loader = PrivacyEngine("rdp").make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(TensorDataset(x), batch_size=1),
        noise_multiplier=0.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        dataset_size=100,
        clipping=clipping,
        self_check=False,
        loss_reduction="sum",
    )
    (rows,) = next(iter(loader))
    (10 * model(rows).sum()).backward()
    optimizer.step()
    assert model.weight.grad.norm() <= 1 + 1e-6
