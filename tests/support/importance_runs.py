"""Runs of DP-IS on a few records whose norms are known."""

from __future__ import annotations

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.support.two_looks import sgd
from vestige import PrivacyEngine

NORMS = [0.0, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0, 1.0, 2.0, 5.0, 0.4, 0.6]


CLIPPED = np.minimum(NORMS, 1.0)


def records(norms, batch_size, method, seed=None, workers=0, optimizer=None, **options):
    """A run whose record i has the gradient norms[i] e_i, whatever the weights."""
    size = len(norms)
    model = nn.Linear(size, 1, bias=False).double()
    nn.init.zeros_(model.weight)
    x = torch.diag(torch.as_tensor(norms, dtype=torch.float64))
    engine = PrivacyEngine("rdp", noise_seed=seed)
    data = TensorDataset(x, torch.arange(size))
    made = engine.make_private(
        module=model,
        optimizer=optimizer(model.parameters()) if optimizer else sgd(1.0)(model.parameters()),
        data_loader=DataLoader(data, batch_size=batch_size, num_workers=workers),
        method=method,
        **{"noise_multiplier": 0.0, "max_grad_norm": 1.0} | options,
    )
    return engine, *made


def step(engine, model, optimizer, x):
    optimizer.zero_grad()
    engine.backward(model(x).squeeze(1))
    optimizer.step()


def go(engine, model, optimizer, loader, count):
    """`count` lots, measuring passes before every epoch."""
    while engine.released < count:
        for x, _ in loader:
            step(engine, model, optimizer, x)
            if engine.released == count:
                break
