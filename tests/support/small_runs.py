"""A small private run of any method: 24 records, lots of 6, a two-layer net in float64."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.methods import Method, resolve

STEPS, LOT, N, SIGMA = 20, 6, 24, 0.8
# Lots of a quarter of the data leave room for four bands.
SETTINGS = {"fractional-noise": {"bands": 3}}


def small(method):
    """The method, with settings that fit the small data where it is given by name."""
    if isinstance(method, Method):
        return method
    return resolve(method, SETTINGS.get(method, {}))


def closure_of(model, optimizer, x, y, reduction="mean"):
    """What optimizer.step(closure) evaluates, once or twice."""

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y, reduction=reduction)
        loss.backward()
        return loss

    return closure


def net():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def flat(tensors):
    return torch.cat([t.detach().flatten() for t in tensors])


def private(method, optimizer=None, model=None, accountant="rdp", engine_options=None, **options):
    model = net() if model is None else model
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (N,), generator=generator)
    engine = PrivacyEngine(accountant, **{"noise_seed": 4} | (engine_options or {}))
    chosen = small(method)
    optimizer = optimizer(model.parameters()) if optimizer else None
    made = engine.make_private(
        module=model,
        optimizer=optimizer or chosen.make_optimizer(model.parameters(), lr=0.05),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=LOT),
        method=chosen,
        **{"noise_multiplier": SIGMA, "max_grad_norm": 1.0} | options,
    )
    return engine, *made


def run(engine, model, optimizer, loader, steps=STEPS, after=lambda: None):
    last = engine.released + steps
    while engine.released < last:
        for x, y in loader:
            optimizer.step(closure_of(model, optimizer, x, y))
            after()
            if engine.released == last:
                break
