"""Runs recorded from the inside, and the formulas of the two memory papers written out as loops.

The sums before the noise are read by wrapping the door: in tests only, never logged. Everything
that the tests compare with is written here from the papers' equations, vector by vector, without
Gram matrices: `fo_*` from arXiv 2605.09890, `sma_*` from arXiv 2605.20450.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from itertools import pairwise
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import dp_accounting
import numpy as np
import torch
import torch.nn.functional as F
from dp_accounting import rdp
from hypothesis import settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils import vector_to_parameters
from torch.utils.data import DataLoader, TensorDataset

from tests.support.reference import clip_and_sum
from vestige import PrivacyEngine
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import Groups, partition
from vestige.memory.history import History
from vestige.privacy.ledger import Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door
from vestige.sampling.lots import draw_lot
from vestige.sampling.streams import Randomness

N, LOT, SEED, RATE = 24, 6, 11, 0.5
BOUND = 0.1  # far below the gradients' norms, so that every record saturates its clip
ROUNDED = 1 + 1e-6  # by how much a clipped norm may exceed its bound
LIMIT = 1e-12

properties = settings(deadline=None, database=None, max_examples=60)
seeds = st.integers(0, 2**32)

# -- real runs, recorded ----------------------------------------------------------------------


def mlp(seed: int = 0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def records(n: int = N, seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 5, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def neighbour() -> TensorDataset:
    """The data without its last record: a lot drawn with the same key has the same other rows."""
    x, y = records().tensors
    return TensorDataset(x[:-1], y[:-1])


@dataclass
class Step:
    """One release: what went into it and what came out, copied."""

    sum: Tensor
    branch: Tensor  # zero where there was none
    silent: bool  # whether there was none
    gain: float
    release: Tensor
    drawn: Tensor  # the release before a replay overwrote it
    planned: Tensor  # its noise as planned: the standard deviation times the step's numbers
    weights: Tensor = field(default_factory=lambda: torch.empty(0))  # before the step
    rows: tuple[Tensor, ...] = ()
    gradient: Tensor = field(default_factory=lambda: torch.empty(0))  # what the optimizer got
    facts: dict[str, Any] = field(default_factory=dict)

    def kernel(self, lags: int, group: int = 0) -> list[float]:
        """The reported weights of the first `lags` lags: beyond them they are filled up with 0."""
        weights = self.facts["weights"][group]
        assert not any(weights[lags:])
        return weights[:lags]

    @property
    def query(self) -> Tensor:
        """r_t: what the door let out, less the noise as planned."""
        return self.drawn - self.planned

    @property
    def noise(self) -> Tensor:
        """Z_t: what the door let out, less beta s_t + b_t."""
        return self.drawn - self.gain * self.sum - self.branch


@dataclass
class Tape:
    """A run: its steps in order, and the engine and the model behind them."""

    engine: PrivacyEngine
    model: nn.Module
    groups: Groups
    steps: list[Step]

    def __iter__(self):
        return iter(self.steps)

    def __getitem__(self, t: int) -> Step:
        return self.steps[t]

    @property
    def releases(self) -> list[Tensor]:
        return [step.release for step in self.steps]

    @property
    def weights(self) -> Tensor:
        """After the last step."""
        return flat(self.groups)

    @property
    def events(self) -> list[tuple[float, float]]:
        """The ledger, one (rate, multiplier) for each charge."""
        charged = self.engine.ledger.events
        return [(e.sample_rate, e.noise_multiplier) for e in charged for _ in range(e.count)]


def flat(groups: Groups) -> Tensor:
    return torch.cat([s.parameter.detach().flatten() for s in groups.slots])


def spread(groups: Groups, numbers) -> Tensor:
    """One number for each group, on each of its coordinates."""
    pairs = zip(groups.segments(), numbers, strict=True)
    return torch.cat([torch.full((s.stop - s.start,), c, dtype=torch.float64) for s, c in pairs])


def train(method="fo", lots=8, *, model=None, data=None, replay=None, lr=0.5, **options) -> Tape:
    """The documented loop for `lots` lots. `replay` puts given releases in place of its own."""
    model = mlp() if model is None else model
    settings = {
        "method": method,
        "max_grad_norm": BOUND,
        "dataset_size": N,
        "steps": lots,
        "self_check": False,
        "noise_multiplier": None if "group_noise_multipliers" in options else 1.0,
    }
    engine = PrivacyEngine(noise_seed=SEED)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=lr),
        data_loader=DataLoader(data or records(), batch_size=LOT),
        **(settings | options),
    )
    tape = Tape(engine, model, partition(model, engine.plan.clipping), [])
    original = Door.release

    def spy(door, clipped, sample_rate, branch=None, gain=1.0, lot=None):
        total = clipped._values.clone()
        values = torch.zeros_like(total) if branch is None else branch.values.clone()
        out = original(door, clipped, sample_rate, branch, gain, lot)
        drawn = out.values.clone()
        if replay is not None:
            out._values.copy_(replay[out.step])
        stds = engine.plan.noise_stds
        row = stds[out.step] if isinstance(stds[0], tuple) else stds
        noise = spread(tape.groups, row) * normals(out.step, total)
        tape.steps.append(
            Step(total, values, branch is None, gain, out.values.clone(), drawn, noise)
        )
        return out

    with patch.object(Door, "release", spy):
        while engine.released < lots:
            for x, y in loader:
                before = flat(tape.groups)
                optimizer.zero_grad()
                F.cross_entropy(model(x), y).backward()
                optimizer.step()
                step = tape.steps[-1]
                step.weights, step.rows = before, (x, y)
                step.gradient = torch.cat([s.parameter.grad.flatten() for s in tape.groups.slots])
                step.facts = engine.diagnostics()
                if engine.released == lots:
                    break
    return tape


def replayed_pair(method, lots=8, **options) -> tuple[Tape, Tape]:
    """The data and its neighbour under one transcript (that of the data) and one mask."""
    tape = train(method, lots, **options)
    return tape, train(method, lots, data=neighbour(), replay=tape.releases, **options)


def assert_close(found: Any, expected: Any, limit: float = LIMIT) -> None:
    found, expected = (torch.as_tensor(v, dtype=torch.float64) for v in (found, expected))
    assert expected.ndim == 0 or found.shape == expected.shape
    scale = max(1.0, float(expected.abs().max())) if expected.numel() else 1.0
    assert torch.isfinite(found).all()
    assert float((found - expected).abs().max() if found.numel() else 0) <= limit * scale


# -- references for what happens before the memory --------------------------------------------


def lot_of(t: int, rate: float = LOT / N, size: int = N) -> list[int]:
    """The records of lot t."""
    return draw_lot(Randomness(SEED), t, size, rate).tolist()


def normals(t: int, like: Tensor) -> Tensor:
    """The standard normal numbers of step t."""
    return torch.cat([z.clone() for _, z in Randomness(SEED).normal_blocks(like, t)])


def clipped_sum(weights: Tensor, rows: tuple[Tensor, ...], groups: Groups, bounds) -> Tensor:
    """sum_i clip(g_i) at `weights` for the MLP: one backward for each row."""
    model = mlp()
    vector_to_parameters(weights.clone(), model.parameters())
    gradients = [torch.zeros_like(weights)]
    for x, y in zip(*rows, strict=True):
        loss = F.cross_entropy(model(x[None]), y[None])
        parts = torch.autograd.grad(loss, list(model.parameters()))
        gradients.append(torch.cat([g.flatten() for g in parts]))
    return clip_and_sum(torch.stack(gradients), groups, Clip(tuple(bounds)))


def simulate(recall, steps, beta, *, clipping="flat", bounds=(BOUND,), stds=(BOUND,), post=False):
    """Algorithm 1 of both papers on its own: the releases and the final weights.

    `recall(past, weights)` is the branch; `post` mixes it in after the release (equations 13-18).
    """
    groups, weights = partition(mlp(), clipping), flat(partition(mlp(), clipping))
    x, y = records().tensors
    past: list[Tensor] = []
    for t in range(steps):
        lot = lot_of(t)
        total = clipped_sum(weights, (x[lot], y[lot]), groups, bounds)
        branch = recall(past, weights)
        noise = spread(groups, stds) * normals(t, weights)
        release = total + noise if post else beta * total + branch + noise
        move = beta * release + branch if post else release
        weights = weights - 0.5 * move / LOT
        past.append(release)
    return past, weights


# -- the papers' memories ---------------------------------------------------------------------


def trend(past: list[Tensor], ema: float) -> Tensor:
    """FO equation 4, SMA Algorithm 1 line 22."""
    mu = past[0]
    for release in past[1:]:
        mu = ema * release + (1 - ema) * mu
    return mu


def normalised(raw: list[float]) -> list[float]:
    return [a / sum(raw) for a in raw]


def mixture(weights: list[float], past: list[Tensor]) -> Tensor:
    """sum_j weights_j s~_(t-j)"""
    return sum((a * past[-j] for j, a in enumerate(weights, 1)), torch.zeros_like(past[0]))


def fo_scores(past: list[Tensor], fo) -> tuple[list[float], float]:
    """Equations 5 and 6: the inconsistency scores by lag, and the confidence."""
    mu = trend(past, fo.ema)
    norm = float(mu.norm())
    scores = [
        float((past[-j] - mu).norm()) / (max(norm, fo.min_scale) + fo.eps)
        for j in range(1, min(fo.window, len(past) + 1))
    ]
    return scores, norm / (norm + fo.confidence)


def fo_kernel(past: list[Tensor], fo) -> list[float]:
    """Equation 7: the raw coefficients by lag."""
    scores, chi = fo_scores(past, fo)
    return [
        (j + 1) ** (fo.alpha - 1) * math.exp(-(fo.tempering + chi * fo.inconsistency * nu) * j)
        for j, nu in enumerate(scores, 1)
    ]


def fo_memory(past: list[Tensor], fo) -> Tensor:
    """Equations 8 and 9: the memory state u_(t-1), 0 before the first release."""
    if not past:
        return torch.zeros((), dtype=torch.float64)
    return mixture(normalised(fo_kernel(past, fo)), past)


def sma_memory(past: list[Tensor], rho: float | None, sma) -> SimpleNamespace:
    """Algorithm 1, lines 4 and 10 to 18, of one group at step t = len(past)."""
    t = len(past)
    low, high = sma.interval
    d = 0.0 if rho is None else max(0.0, low - rho, rho - high)
    lam = 1 - math.exp(-sma.tempering * d)
    lags = range(1, min(sma.window - 1, t) + 1)
    weights = normalised([(j + 1) ** (sma.alpha - 1) * math.exp(-lam * j) for j in lags])
    nu, mu = mixture(weights, past), trend(past, sma.ema)
    gamma = max(0.0, float(mu @ nu) / (float(mu.norm()) * float(nu.norm()) + sma.eps))
    psi = min(sma.norm_cap, float(mu.norm()) / (float(nu.norm()) + sma.eps))
    omega = 1 - math.exp(-t / sma.warmup)
    return SimpleNamespace(
        d=d, lam=lam, weights=weights, nu=nu, gamma=gamma, psi=psi, omega=omega,
        state=omega * gamma * psi * nu,
    )  # fmt: skip


def hill(weight: Tensor) -> float:
    """The exponent of the upper half of the spectrum of W^T W (ALGORITHMS 20)."""
    values = torch.linalg.svdvals(weight.double().flatten(1)).square()
    tail = values[: math.ceil(len(values) / 2)]
    return 1 + len(tail) / float((tail / tail[-1]).log().sum())


def papers_epsilon(steps: list[tuple[float, float]], delta: float) -> float:
    """inf over orders of sum_t eps_SGM(order; q_t, sigma_t) + log(1/delta) / (order - 1)."""
    orders = np.arange(2, 64)
    total = np.zeros(len(orders))
    for rate, multiplier in steps:
        one = rdp.RdpAccountant(orders, dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        gaussian = dp_accounting.GaussianDpEvent(multiplier)
        one.compose(dp_accounting.PoissonSampledDpEvent(rate, gaussian))
        total += np.asarray(one._rdp)
    bounds = total + math.log(1 / delta) / (orders - 1)
    # Vestige tries these whole orders too, so that both see the minimum if it is here.
    assert 8 < orders[bounds.argmin()] < 63
    return float(bounds.min())


# -- transcripts without a model ----------------------------------------------------------------


def vectors(seed: int, count: int) -> list[Tensor]:
    """`count` releases of six standard normal numbers."""
    return list(torch.from_numpy(np.random.default_rng(seed).normal(size=(count, 6))))


def history_of(vectors: list[Tensor], window: int, ema: float, parts: int = 1) -> History:
    """A real history that a real door, without noise, has released `vectors` into."""
    size = len(vectors[0])
    groups = partition(nn.Linear(size, 1, bias=False, dtype=torch.float64), "flat")
    door = Door(groups, NoiseScale.shared(0.0), Randomness(SEED), Ledger())
    edges = [size * i // parts for i in range(parts + 1)]
    segments = [slice(a, b) for a, b in pairwise(edges)]
    history = History(segments, groups.buffer(), window, ema)
    for vector in vectors:
        history.append(door.release(ClippedSum(vector, (1.0,)), 0.1))
    return history


@st.composite
def transcripts(draw, most: int = 7) -> list[Tensor]:
    """Releases at scales from 1e-12 to 1e12: random, zero, repeated or the opposite of the last."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    shared = draw(st.integers(-12, 12))
    vectors = [torch.from_numpy(rng.normal(size=6)) * 10.0**shared]
    for _ in range(draw(st.integers(0, most - 1))):
        kind = draw(st.sampled_from(["random", "other scale", "zero", "same", "opposite"]))
        scale = 10.0 ** (draw(st.integers(-12, 12)) if kind == "other scale" else shared)
        vectors.append(
            {
                "zero": torch.zeros(6, dtype=torch.float64),
                "same": vectors[-1].clone(),
                "opposite": -vectors[-1],
            }.get(kind, torch.from_numpy(rng.normal(size=6)) * scale)
        )
    if draw(st.booleans()):
        vectors[0] = torch.zeros(6, dtype=torch.float64)
    return vectors
