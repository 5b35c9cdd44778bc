"""The backward pass: what it needed of a batch is gone when it is over."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine, PrivacyError

WIDTH = 37  # of nothing but the activations


def held() -> int:
    """How many activations are alive."""
    gc.collect()
    shapes = [thing.shape for thing in gc.get_objects() if type(thing) is torch.Tensor]
    return sum(shape == (6, WIDTH) for shape in shapes)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_who_keeps_the_loss_keeps_no_activations(clipping):
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    x, y = torch.randn(6, 5), torch.randint(0, 3, (6,))
    _, optimizer, loader = PrivacyEngine("rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        sample_rate=1.0,
        clipping=clipping,
    )
    for a, b in loader:
        loss = F.cross_entropy(model(a), b)
        assert held() > 0
        loss.backward(retain_graph=True)
        assert held() == 0
        with pytest.raises(PrivacyError, match="second backward"):
            loss.backward()
        optimizer.step()


def test_passes_outside_of_a_batch_keep_nothing():
    """Whoever evaluates without no_grad must not fill the memory with activations."""
    model = nn.Sequential(nn.Linear(5, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))
    PrivacyEngine("rdp").make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(TensorDataset(torch.randn(6, 5), torch.zeros(6)), batch_size=6),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(5):
        model(torch.randn(6, 5))
    assert held() == 0
