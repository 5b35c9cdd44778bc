"""Record and replay: a run on D, then one on D without a record with the releases frozen.

Whatever is computed outside the clipped sum (branches, gates, exponents, scales, diagnostics,
weights) must come out identical, bit for bit, since it may depend on the releases alone; and the
query may move by beta times the clipping norm, no further.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.history import History
from vestige.methods import METHODS, resolve
from vestige.release import Door

SIZE, STEPS = 30, 24
BETA, CLIP = 0.7, 0.5


@dataclass
class Recording:
    """What a run showed, step by step."""

    queries: list = field(default_factory=list)
    branches: list = field(default_factory=list)
    releases: list = field(default_factory=list)
    weights: list = field(default_factory=list)
    told: list = field(default_factory=list)
    segments: list = field(default_factory=list)


def settings_of(name):
    known = METHODS[name].__dataclass_fields__
    wanted = {"beta": BETA, "window": 5, "interval": (3.0, 3.1), "tempering": 0.7, "fixed": 0.3}
    return {key: value for key, value in wanted.items() if key in known}


def record(monkeypatch, name, dataset, frozen=None, prefetch=0, leak=False):
    """Run `name` on `dataset`; with `frozen` releases, every release is replaced by those.

    `leak` breaks the history: it remembers the query without its noise.
    """
    seen = Recording()
    original, append = Door.release, History.append

    def leaking(self, release):
        kept = release.values.clone()
        release.values.copy_(seen.queries[-1])
        append(self, release)
        release.values.copy_(kept)

    def release(self, clipped, sample_rate, branch=None, gain=1.0):
        memory = None if branch is None else branch.values.clone()
        total = clipped._values
        seen.queries.append(gain * total + (0 if memory is None else memory))
        seen.branches.append(memory)
        seen.segments = self._segments
        out = original(self, clipped, sample_rate, branch, gain)
        if frozen is not None:
            out.values.copy_(frozen[len(seen.releases)])
        seen.releases.append(out.values.clone())
        return out

    monkeypatch.setattr(Door, "release", release)
    if leak:
        monkeypatch.setattr(History, "append", leaking)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))
    engine = PrivacyEngine("rdp", noise_seed=9)
    model, optimizer, loader = engine.make_private(
        module=model.double(),
        optimizer=resolve(name).make_optimizer(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=6, num_workers=prefetch),
        method=resolve(name, settings_of(name)),
        dataset_size=SIZE,
        steps=STEPS,
        noise_multiplier=0.8,
        max_grad_norm=CLIP,
    )
    while engine.released < STEPS:
        for a, b in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            seen.told.append(engine.diagnostics())
            seen.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            if engine.released == STEPS:
                break
    monkeypatch.setattr(Door, "release", original)
    monkeypatch.setattr(History, "append", append)
    return seen, engine


def neighbours(scale=50.0):
    """A dataset and the same without its last record, whose gradient is large."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (SIZE,), generator=generator)
    x[-1] *= scale
    return TensorDataset(x, y), TensorDataset(x[:-1], y[:-1])


def same(a, b):
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


@pytest.mark.parametrize(
    ("name", "prefetch"), [*((name, 0) for name in METHODS), ("fo", 1), ("sma", 1)]
)
def test_everything_but_the_sum_depends_on_the_releases_alone(name, prefetch, monkeypatch):
    whole, without = neighbours()
    first, engine = record(monkeypatch, name, whole, prefetch=prefetch)
    second, _ = record(monkeypatch, name, without, frozen=first.releases, prefetch=prefetch)
    assert all(same(a, b) for a, b in zip(first.branches, second.branches, strict=True))
    assert first.told == second.told
    assert all(same(a, b) for a, b in zip(first.weights, second.weights, strict=True))
    moved = [a - b for a, b in zip(first.queries, second.queries, strict=True)]
    bounds, beta = engine.plan.bounds, engine.plan.beta
    for move in moved:
        joint = float(move.norm())
        assert joint <= beta * math.sqrt(sum(c * c for c in bounds)) * (1 + 1e-6)
        for segment, bound in zip(first.segments, bounds, strict=True):
            assert float(move[segment].norm()) <= beta * bound * (1 + 1e-6)
    present = [float(m.norm()) for m in moved if float(m.norm()) > 0]
    assert 0 < len(present) < STEPS  # the record was in some lots and not in others
    assert max(present) > 0.8 * beta * CLIP  # and it nearly used its bound up
    if engine.plan.beta < 1:
        assert sum(b is not None and bool(b.any()) for b in first.branches) == STEPS - 1


@pytest.mark.parametrize("name", ["fo", "sma", "uniform"])
def test_a_memory_of_sums_without_noise_would_be_caught(name, monkeypatch):
    """The yardstick itself: a history that remembers the query instead of the release."""
    whole, without = neighbours()
    first, _ = record(monkeypatch, name, whole, leak=True)
    second, _ = record(monkeypatch, name, without, frozen=first.releases, leak=True)
    assert not all(same(a, b) for a, b in zip(first.branches, second.branches, strict=True))
    assert first.told != second.told
