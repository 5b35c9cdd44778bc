"""Short private runs of a model that multiplies by random numbers and shows them."""

from __future__ import annotations

import random

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine

ROWS, WIDTH = 24, 16
NAMED = np.random.default_rng(0)  # as at the top of a notebook


def by_dropout(rows):
    return F.dropout(torch.ones(rows, WIDTH), 0.5) / 2


def by_torch(rows):
    return torch.rand(rows, WIDTH)


def by_numpy(rows):
    return torch.tensor(np.random.rand(rows, WIDTH))


def by_random(rows):
    return torch.tensor([[random.random() for _ in range(WIDTH)] for _ in range(rows)])


def by_named(rows):
    return torch.tensor(NAMED.random((rows, WIDTH)))


def by_local(rows):
    return torch.rand(rows, WIDTH, generator=torch.Generator().manual_seed(0))


DRAWS = [by_dropout, by_torch, by_numpy, by_random, by_named, by_local]


def holding(make, draw):
    """A way to draw from a generator that the model holds."""
    holder = type("Holder", (), {})()
    holder.generator = make()

    def from_holder(rows):
        return draw(holder.generator, rows)

    return from_holder


HELD = {
    "torch": lambda: holding(
        lambda: torch.Generator().manual_seed(0), lambda g, n: torch.rand(n, WIDTH, generator=g)
    ),
    "Generator": lambda: holding(
        lambda: np.random.default_rng(0), lambda g, n: torch.tensor(g.random((n, WIDTH)))
    ),
    "Philox": lambda: holding(
        lambda: np.random.Generator(np.random.Philox(0)),
        lambda g, n: torch.tensor(g.random((n, WIDTH))),
    ),
    "RandomState": lambda: holding(
        lambda: np.random.RandomState(0), lambda g, n: torch.tensor(g.rand(n, WIDTH))
    ),
    "Random": lambda: holding(
        lambda: random.Random(0),
        lambda g, n: torch.tensor([[g.random() for _ in range(WIDTH)] for _ in range(n)]),
    ),
}


class Masked(nn.Module):
    """Multiplies by random numbers, and shows them to the test."""

    def __init__(self, draw=by_dropout, show=None):
        super().__init__()
        self.first, self.last = nn.Linear(3, WIDTH), nn.Linear(WIDTH, 2)
        self.draw, self.show = draw, show or (lambda mask: None)

    def forward(self, x):
        mask = self.draw(len(x)).to(x.dtype) if self.training else torch.ones(len(x), WIDTH)
        self.show(mask)
        return self.last(self.first(x) * mask)


def data(rows=ROWS):
    made = torch.Generator().manual_seed(1)
    return torch.randn(ROWS, 3, generator=made)[:rows], torch.arange(rows) % 2


def private(model, noise_seed=None, rows=ROWS, loader=None, method="dp-sgd", **options):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine = PrivacyEngine("rdp", noise_seed=noise_seed)
    loader = loader or DataLoader(TensorDataset(*data(rows)), batch_size=8)
    _, optimizer, loader = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        method=method,
        **{"sample_rate": 1.0, "self_check": False} | options,
    )
    return engine, model, optimizer, loader


def masks(draw=by_dropout, noise_seed=None, steps=2, seed=0, between=lambda: None, **options):
    """The random numbers of every forward pass on records of a short run, after seeding all."""
    seen = []
    torch.manual_seed(5)
    engine, model, optimizer, loader = private(Masked(draw, seen.append), noise_seed, **options)
    seen.clear()  # of a self-check
    seed_all(seed)
    done = 0
    while done < steps:
        for x, y in loader:
            between()
            before = len(seen)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            if not x.any():  # a spare batch
                del seen[before:]
            done = engine.released
            if done == steps:
                break
    engine.detach()
    return seen


def seed_all(seed):
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


def state_of_all():
    """The user's generators, bit for bit."""
    kind, words, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), (kind, words.tolist(), *rest)


def equal(some, others):
    return len(some) == len(others) and all(map(torch.equal, some, others))
