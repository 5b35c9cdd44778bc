"""A small model, its data and a user's own loop."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine

N = 24


def mlp(seed=0, dtype=torch.float32):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def records(n=N, seed=1, scale=1.0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    x = scale * torch.randn(n, 5, generator=generator, dtype=dtype)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def private(model=None, dataset=None, batch_size=6, optimizer=None, engine=None, **options):
    """A small private run: (engine, model, optimizer, loader), repeatable unless told otherwise."""
    model = mlp() if model is None else model
    engine = engine or PrivacyEngine(noise_seed=11)
    if optimizer is None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if "group_noise_multipliers" not in options:
        options.setdefault("noise_multiplier", 1.0)
    options.setdefault("max_grad_norm", 1.0)
    loader = DataLoader(dataset or records(), batch_size=batch_size)
    return engine, *engine.make_private(
        module=model, optimizer=optimizer, data_loader=loader, **options
    )


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def epoch(model, optimizer, loader, after=lambda: None, limit=None):
    """One epoch of the documented loop; returns the number of batches."""
    batches = 0
    for x, y in loader:
        step(model, optimizer, x, y)
        after()
        batches += 1
        if batches == limit:
            break
    return batches


def mean_loss(model, batch):
    return F.cross_entropy(model(batch[0]), batch[1])


def lot_sum(model, dataset, loss=mean_loss, **options):
    """The clipped sum of a lot of all records, read off the public API: no noise, divisor 1.

    With `dataset_size` declared, nothing but the records tells one dataset from another.
    """
    options = {"sample_rate": 1.0, "dataset_size": N, "noise_multiplier": 0.0} | options
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, model, optimizer, loader = private(model, dataset, 1, optimizer, **options)
    for batch in loader:
        loss(model, batch).backward()
        optimizer.step()
        if engine.released:
            break
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.requires_grad])


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
