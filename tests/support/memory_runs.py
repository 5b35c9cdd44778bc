"""Small private runs of methods with a memory, and streams of releases."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.gradients.groups import partition
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door
from vestige.sampling.streams import Randomness

N, LOT = 24, 6


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 6), nn.Linear(6, 3)
        )


def records(n=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 5, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def private(method, model=None, engine=None, optimizer=None, **options):
    """A small private run: (engine, model, optimizer, loader)."""
    model = net() if model is None else model
    engine = engine or PrivacyEngine("rdp", noise_seed=11)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if "group_noise_multipliers" not in options:
        options.setdefault("noise_multiplier", 1.0)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records(), batch_size=LOT),
        method=method,
        **{"max_grad_norm": 1.0} | options,
    )
    return engine, *made


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def run(engine, model, optimizer, loader, steps, after=lambda: None):
    last = engine.released + steps
    while engine.released < last:
        for x, y in loader:
            step(model, optimizer, x, y)
            after()
            if engine.released == last:
                break


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def releases(count, size=50, parts=1, dtype=torch.float64, scale=1.0, seed=3, device="cpu"):
    """A door and its releases of random sums, as (generator of releases, groups)."""
    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for _ in range(parts)))
    model = model.to(device, dtype)
    groups = partition(model, "per_layer")
    door = Door(groups, NoiseScale.shared(1.0), Randomness(seed), Ledger())
    generator = torch.Generator().manual_seed(seed)
    bounds = (1.0,) * parts

    def stream():
        for _ in range(count):
            total = scale * torch.randn(groups.size, generator=generator, dtype=dtype)
            yield door.release(ClippedSum(total.to(device), bounds), 0.5)

    return stream(), groups
