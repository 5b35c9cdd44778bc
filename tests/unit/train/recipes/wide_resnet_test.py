"""WRN-16-4: its size, its standardised kernels, and that examples do not touch each other."""

from __future__ import annotations

import torch

from vestige.train.models import build
from vestige.train.recipes.wide_resnet import StandardConv


def test_kernels_have_mean_0_and_variance_1_over_their_inputs():
    layer, x = StandardConv(3, 5, 3, bias=False), torch.randn(2, 3, 6, 6)
    with torch.no_grad():
        layer.weight.mul_(7).add_(1)
        kernels = layer.weight.double().flatten(1)
        scaled = kernels - kernels.mean(1, keepdim=True)
        scaled /= scaled.norm(dim=1, keepdim=True)
        expected = torch.nn.functional.conv2d(x.double(), scaled.view(5, 3, 3, 3))
    torch.testing.assert_close(layer(x).double(), expected, rtol=1e-4, atol=1e-5)


def test_its_size():
    sizes = [p.numel() for p in build("wrn", (3, 32, 32), 10).parameters()]
    assert sum(sizes) == 2_751_562


def test_gradients_reach_every_parameter():
    model = build("wrn", (3, 16, 16), 4, seed=0)
    model(torch.randn(2, 3, 16, 16)).square().sum().backward()
    assert all(float(p.grad.abs().sum()) > 0 for p in model.parameters())
