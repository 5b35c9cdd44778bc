"""The backward pass: what it needed of a batch is gone when it is over."""

from __future__ import annotations

import gc

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.loops import lot_sum, private, records
from vestige import PrivacyEngine, PrivacyError

WIDTH = 37  # of nothing but the activations


def held() -> int:
    """How many activations are alive."""
    for _ in range(3):  # a round frees nodes of autograd, the next one what they have hidden
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


def adversaries():
    torch.manual_seed(0)
    critic = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 1))
    maker = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 5))
    return critic, maker, torch.optim.SGD(maker.parameters(), lr=0.1)


def mean_error(out, wanted):
    return F.binary_cross_entropy_with_logits(out, torch.full_like(out, wanted))


def test_a_generator_learns_from_a_private_discriminator_that_is_frozen_for_its_step():
    critic, maker, ours = adversaries()
    engine, critic, optimizer, loader = private(critic, records())
    before = [p.detach().clone() for p in maker.parameters()]
    for x, _ in loader:
        made = maker(torch.randn(len(x), 2)).detach()
        (mean_error(critic(x), 1.0) + mean_error(critic(made), 0.0)).backward()
        optimizer.step()
        optimizer.zero_grad()
        critic.requires_grad_(False)
        mean_error(critic(maker(torch.randn(6, 2))), 1.0).backward()
        ours.step()
        ours.zero_grad()
        critic.requires_grad_(True)
    assert engine.released == len(loader)
    assert not any(torch.equal(p, q) for p, q in zip(before, maker.parameters(), strict=True))


def test_what_a_record_and_its_counterfeit_add_is_clipped_together():
    """Two passes, one backward: the sum is that of a model of both."""
    critic, _, _ = adversaries()
    made = torch.randn(24, 5)

    def loss(model, batch):
        return mean_error(model(batch[0]), 1.0) + mean_error(model(made), 0.0)

    data = records()
    options = {"max_grad_norm": 0.3}
    got = lot_sum(critic, data, loss, **options)
    expected = torch.zeros_like(got)
    for i in range(len(made)):
        pair = torch.stack([data[i][0], made[i]])
        errors = F.binary_cross_entropy_with_logits(
            critic(pair), torch.tensor([[1.0], [0.0]]), reduction="sum"
        )
        row = torch.cat([g.flatten() for g in torch.autograd.grad(errors, critic.parameters())])
        expected += row / max(1.0, float(row.norm()) / 0.3)
    assert torch.allclose(got, expected, atol=1e-5)


def test_a_generator_whose_discriminator_is_not_frozen_is_told_to_freeze_it():
    critic, maker, _ = adversaries()
    _, critic, optimizer, loader = private(critic, records())
    x, _ = next(iter(loader))
    mean_error(critic(x), 1.0).backward()
    optimizer.step()
    with pytest.raises(PrivacyError, match=r"generator.*requires_grad_\(False\)"):
        mean_error(critic(maker(torch.randn(len(x), 2))), 1.0).backward()
