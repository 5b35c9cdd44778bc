"""Record and replay: a run on D, then one on a neighbour of D with everything released frozen.

Whatever is computed outside the clipped sum (branches, gates, exponents, clip bounds, noise scales,
diagnostics, weights) must come out identical, bit for bit, since it may depend on the releases
alone; and every query may move by its gain times its bound, no further. The methods that were
published as private and are not must fail this, and do.
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
from vestige.clipping import Quantile
from vestige.geometry import to_hyperspherical
from vestige.geometry.published import angle_scale
from vestige.history import History
from vestige.methods import DPSAM, METHODS, Disk, Doppler, DPAdamAC, GeoDP, Kalman, resolve
from vestige.release import Door

SIZE, STEPS, LOT = 30, 24, 6
BETA, CLIP = 0.7, 0.5


@dataclass
class Recording:
    """What a run showed, step by step."""

    queries: list = field(default_factory=list)  # gain * sum + branch
    gains: list = field(default_factory=list)
    bounds: list = field(default_factory=list)
    counts: list = field(default_factory=list)  # of quantile clipping, before their noise
    norms: list = field(default_factory=list)  # of importance sampling, before its noise
    branches: list = field(default_factory=list)
    released: list = field(default_factory=list)  # everything that came out of the door
    scales: list = field(default_factory=list)  # bounds and standard deviations
    weights: list = field(default_factory=list)
    told: list = field(default_factory=list)
    segments: list = field(default_factory=list)


class Tape:
    """Patches the door: records what goes in and out, and plays earlier releases back."""

    def __init__(self, frozen=None, leak=False):
        self.seen, self.leak = Recording(), leak
        self._frozen = None if frozen is None else iter(frozen)

    def patch(self, monkeypatch):
        seen, originals = self.seen, (Door.release, Door.first_look, Door.measure)
        append = History.append

        def note(door, clipped, gain, branch):
            memory = None if branch is None else branch.values.clone()
            seen.queries.append(gain * clipped._values + (0 if memory is None else memory))
            seen.gains.append(gain)
            seen.bounds.append(clipped.bounds)
            seen.branches.append(memory)
            seen.segments = door._segments
            if clipped._counts is not None:
                seen.counts.append(clipped._counts.clone())

        def out_of(release):
            if self._frozen is not None:
                values, counts = next(self._frozen)
                release.values.copy_(values)
                release.counts = counts
            seen.released.append((release.values.clone(), release.counts))
            seen.scales.append((seen.bounds[-1], release.stds))
            return release

        def release(door, clipped, sample_rate, branch=None, gain=1.0, lot=None):
            note(door, clipped, gain, branch)
            return out_of(originals[0](door, clipped, sample_rate, branch, gain, lot))

        def first_look(door, clipped, sample_rate, lot):
            note(door, clipped, 1.0, None)
            return out_of(originals[1](door, clipped, sample_rate, lot))

        def measure(door, total, bound, multiplier, lot):
            seen.norms.append(total)
            noisy = originals[2](door, total, bound, multiplier, lot)
            noisy = noisy if self._frozen is None else next(self._frozen)
            seen.released.append(noisy)
            return noisy

        def leaking(history, release):
            kept = release.values.clone()
            release.values.copy_(seen.queries[-1])
            append(history, release)
            release.values.copy_(kept)

        monkeypatch.setattr(Door, "release", release)
        monkeypatch.setattr(Door, "first_look", first_look)
        monkeypatch.setattr(Door, "measure", measure)
        if self.leak:
            monkeypatch.setattr(History, "append", leaking)


def small_settings(name):
    known = METHODS[name].__dataclass_fields__
    wanted = {
        "beta": BETA,
        "window": 5,
        "interval": (3.0, 3.1),
        "tempering": 0.7,
        "fixed": 0.3,
        "bands": 4,
    }
    return resolve(name, {key: value for key, value in wanted.items() if key in known})


def record(monkeypatch, method, dataset, frozen=None, prefetch=0, leak=False, **options):
    """Run `method` on `dataset`; with `frozen`, everything released is replaced by that.

    `leak` breaks the history: it remembers the query without its noise.
    """
    tape = Tape(frozen, leak)
    seen = tape.seen
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.LayerNorm(10), nn.Linear(10, 3))
    engine = PrivacyEngine("rdp", noise_seed=9)
    chosen = small_settings(method) if isinstance(method, str) else method
    declared = {} if chosen.name == "dp-ftrl" else {"dataset_size": SIZE}
    model, optimizer, loader = engine.make_private(
        module=model.double(),
        optimizer=chosen.make_optimizer(model.parameters(), lr=0.1),
        data_loader=DataLoader(dataset, batch_size=LOT, num_workers=prefetch),
        method=chosen,
        steps=STEPS,
        **{"noise_multiplier": 0.8, "max_grad_norm": CLIP} | declared | options,
    )
    with monkeypatch.context() as patched:
        tape.patch(patched)
        while engine.released < STEPS:
            for a, b, w in loader:

                def closure(a=a, b=b, w=w):
                    optimizer.zero_grad()
                    engine.backward(w * F.cross_entropy(model(a), b, reduction="none"))

                optimizer.step(closure)
                seen.told.append(engine.diagnostics())
                seen.weights.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
                if engine.released == STEPS:
                    break
    return seen, engine


def neighbours(method=None, scale=50.0):
    """A dataset and its neighbour: the last record, whose gradient is large, is left out, or has
    weight zero where that is the adjacency."""
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(SIZE, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (SIZE,), generator=generator)
    weight = torch.ones(SIZE, dtype=torch.float64)
    x[-1] *= scale
    if method == "dp-ftrl":
        silent = weight.clone()
        silent[-1] = 0
        return TensorDataset(x, y, weight), TensorDataset(x, y, silent)
    return TensorDataset(x, y, weight), TensorDataset(x[:-1], y[:-1], weight[:-1])


def same(a, b):
    return (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))


def all_same(first, second):
    return all(same(a, b) for a, b in zip(first, second, strict=True))


def both(monkeypatch, method, data, **options):
    first, engine = record(monkeypatch, method, data[0], **options)
    second, _ = record(monkeypatch, method, data[1], frozen=first.released, **options)
    return first, second, engine


def moves(first, second):
    return [a - b for a, b in zip(first.queries, second.queries, strict=True)]


PRIVATE = [name for name, method in METHODS.items() if method.private]
VARIANTS = [
    DPSAM(sample="fresh"),
    Disk(ahead=0.5),
    Kalman(beta=BETA),
    Doppler(beta=BETA),
]


@pytest.mark.parametrize(
    ("method", "options"),
    [
        *((name, {}) for name in PRIVATE),
        *((method, {}) for method in VARIANTS),
        ("fo", {"prefetch": 1}),
        ("sma", {"prefetch": 1}),
        ("dp-sgd", {"clipping": "quantile"}),
        ("fo", {"clipping": "quantile_per_layer"}),
        ("dp-sam", {"clipping": Quantile("per_layer", count_noise=2.0)}),
        ("geodp-tangent", {"clipping": "quantile"}),
    ],
    ids=str,
)
def test_everything_but_the_sum_depends_on_the_releases_alone(method, options, monkeypatch):
    first, second, engine = both(monkeypatch, method, neighbours(method), **options)
    assert all_same(first.branches, second.branches)
    assert first.scales == second.scales
    assert first.told == second.told
    assert all_same(first.weights, second.weights)
    used = []
    for move, gain, bounds in zip(moves(first, second), first.gains, first.bounds, strict=True):
        joint = math.sqrt(sum(c * c for c in bounds))
        assert float(move.norm()) <= gain * joint * (1 + 1e-6)
        for segment, bound in zip(first.segments, bounds, strict=True):
            assert float(move[segment].norm()) <= gain * bound * (1 + 1e-6)
        used.append(float(move.norm()) / (gain * joint))
    present = [share for share in used if share > 0]
    assert 0 < len(present) < len(used)  # the record was in some lots and not in others
    assert max(present) > 0.7  # and it nearly used its bound up
    for a, b in zip(first.counts, second.counts, strict=True):
        assert float((a - b).abs().max()) <= 0.5
    for a, b in zip(first.norms, second.norms, strict=True):
        assert 0 < a - b <= 1 + 1e-9
    if engine.plan.beta < 1:
        assert sum(b is not None and bool(b.any()) for b in first.branches) == STEPS - 1


@pytest.mark.parametrize("name", ["fo", "sma", "uniform"])
def test_a_memory_of_sums_without_noise_would_be_caught(name, monkeypatch):
    """The yardstick itself: a history that remembers the query instead of the release."""
    first, second, _ = both(monkeypatch, name, neighbours(), leak=True)
    assert not all_same(first.branches, second.branches)
    assert first.told != second.told


def test_adaptive_clipping_as_published_fails(monkeypatch):
    """One record flips the percentile of the raw norms: noise scale and step size follow it."""
    method = DPAdamAC(clipped=0.2, window=8, lowest=1e-3, highest=1e3)
    first, second, engine = both(monkeypatch, method, neighbours())
    assert first.scales != second.scales
    widest = max(a[0][0] / b[0][0] for a, b in zip(first.scales, second.scales, strict=True))
    assert widest > 1.05  # the noise of a step says whether the record is there
    assert engine.get_epsilon(1e-5) == math.inf


def test_geodp_as_published_fails(monkeypatch):
    """15.3 of the literature's mechanism: one record turns the last angle by pi, or nearly so,
    where its noise is made for 2 pi * bounding / lot."""
    first, second, engine = both(monkeypatch, GeoDP(), adversarial())
    claimed = angle_scale(first.queries[0].numel(), LOT, GeoDP().bounding)
    turned = 0.0
    for a, b in zip(first.queries, second.queries, strict=True):
        angles = [to_hyperspherical(q[None].double())[1][0] for q in (a, b)]
        apart = (angles[0] - angles[1]).abs()
        apart[-1] = min(float(apart[-1]), 2 * math.pi - float(apart[-1]))
        turned = max(turned, float(apart.norm()))
    assert turned > 2 * claimed
    assert engine.get_epsilon(1e-5) == math.inf


def adversarial():
    """Records whose gradients nearly cancel, and one that decides the sign of the sum."""
    x = torch.zeros(SIZE, 6, dtype=torch.float64)
    x[:, 0] = torch.where(torch.arange(SIZE) % 2 == 0, 1.0, -1.0)
    y = torch.zeros(SIZE, dtype=torch.int64)
    x[-1, 0] = 5.0
    y[-1] = 1
    weight = torch.ones(SIZE, dtype=torch.float64)
    whole = TensorDataset(x, y, weight)
    return whole, TensorDataset(x[:-1], y[:-1], weight[:-1])
