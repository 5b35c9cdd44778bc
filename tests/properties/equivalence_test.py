"""FO and SMA at (sigma, beta) are DP-SGD at sigma/beta with a filter of its transcript after it.

The filter is written here from the papers' equations, with loops over lags and groups and the
releases themselves, as an optimizer that is handed the releases of an ordinary DP-SGD run.
"""

from __future__ import annotations

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import PrivacyEngine
from vestige.methods import DPSGD, FO, SMA, CurrentOnly, Exponential, PostFM, Uniform

STEPS, LOT, SIGMA, LR = 60, 8, 0.7, 0.3
FO_SETTINGS = {"alpha": 0.6, "window": 8, "tempering": 0.05, "inconsistency": 0.2, "ema": 0.25}
SMA_SETTINGS = {"alpha": 0.6, "window": 8, "interval": (3.0, 3.2), "tempering": 0.4, "ema": 0.25}


def model_of(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Linear(9, 12), nn.Tanh(), nn.LayerNorm(12), nn.Linear(12, 4)
        ).double()


def train(method, noise, make_optimizer=None, steps=STEPS, clipping="per_layer", **options):
    """The weights after every step, the engine, and the diagnostics of every step."""
    model = model_of()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 9, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 4, (40,), generator=generator)
    make_optimizer = make_optimizer or (lambda p: torch.optim.SGD(p, lr=LR))
    engine = PrivacyEngine("rdp", noise_seed=5)
    model, optimizer, loader = engine.make_private(
        module=model,
        optimizer=make_optimizer(model.parameters()),
        data_loader=DataLoader(TensorDataset(x, y), batch_size=LOT),
        noise_multiplier=noise,
        max_grad_norm=1.0,
        clipping=clipping,
        method=method,
        steps=steps,
        **options,
    )
    path, told = [], []
    while engine.released < steps:
        for a, b in loader:
            optimizer.zero_grad()
            F.cross_entropy(model(a), b).backward()
            optimizer.step()
            path.append(torch.cat([p.detach().flatten() for p in model.parameters()]))
            told.append(engine.diagnostics())
            if engine.released == steps:
                break
    return path, engine, told


class Filter(torch.optim.Optimizer):
    """Turns the gradients of a DP-SGD run (releases / lot) into the steps of a memory method."""

    def __init__(self, params, beta, window, recall):
        super().__init__(list(params), {})
        self.beta, self.window, self.recall = beta, window, recall
        self.past = []  # own releases by parameter, newest first
        self.time = 0

    @torch.no_grad()
    def step(self, closure=None):
        params = self.param_groups[0]["params"]
        beta = self.beta(self.time)
        memory = self.recall(self.past[: self.window - 1], params, self.time)
        new = []
        for i, p in enumerate(params):
            release = beta * LOT * p.grad
            if memory is not None:
                release = release + (1 - beta) * memory[i]
            new.append(release)
            p.sub_(LR * release / LOT)
        self.past.insert(0, new)
        self.time += 1


def norm(parts):
    return math.sqrt(sum(float((p * p).sum()) for p in parts))


def average(weights, past, members):
    return [sum(w * s[i] for w, s in zip(weights, past, strict=True)) for i in members]


def fo_recall(alpha, window, tempering, inconsistency, ema, kappa=1e-6, zeta=1.0, eps=1e-12):
    trend = []

    def recall(past, params, _):
        if not past:
            return None
        trend[:] = (
            [ema * s + (1 - ema) * m for s, m in zip(past[0], trend, strict=True)]
            if trend
            else [s.clone() for s in past[0]]
        )
        if window == 1:
            return None
        size = norm(trend)
        chi = size / (size + zeta)
        raw = []
        for j, s in enumerate(past, start=1):
            nu = norm([a - b for a, b in zip(s, trend, strict=True)]) / (max(size, kappa) + eps)
            raw.append(
                (j + 1) ** (alpha - 1) * math.exp(-(tempering + chi * inconsistency * nu) * j)
            )
        return average([a / sum(raw) for a in raw], past, range(len(params)))

    return recall


def hill(weight):
    x = sorted((torch.linalg.svdvals(weight.double()) ** 2).tolist(), reverse=True)
    x = [v for v in x if v >= 1e-10 * x[0]]
    x = x[: math.ceil(len(x) / 2)]
    return 1 + len(x) / sum(math.log(v / x[-1]) for v in x)


def sma_recall(alpha, window, interval, tempering, ema, warmup, cap=1.0, eps=1e-12):
    groups = [(0, 1), (2, 3), (4, 5)]  # linear, layer norm, linear: weight and bias
    trend = {}

    def recall(past, params, t):
        if not past:
            return None
        memory = [None] * len(params)
        for g in groups:
            new = [past[0][i] for i in g]
            old = trend.get(g, new)
            trend[g] = [ema * a + (1 - ema) * b for a, b in zip(new, old, strict=True)]
            d = 0.0
            if params[g[0]].ndim == 2:
                rho = hill(params[g[0]])
                d = max(0.0, interval[0] - rho, rho - interval[1])
            lam = 1 - math.exp(-tempering * d)
            raw = [(j + 1) ** (alpha - 1) * math.exp(-lam * j) for j in range(1, len(past) + 1)]
            nu = average([a / sum(raw) for a in raw], past, g)
            inner = sum(float((a * b).sum()) for a, b in zip(trend[g], nu, strict=True))
            gamma = max(0.0, inner / (norm(trend[g]) * norm(nu) + eps))
            psi = min(cap, norm(trend[g]) / (norm(nu) + eps))
            omega = 1 - math.exp(-t / warmup)
            for i, part in zip(g, nu, strict=True):
                memory[i] = omega * gamma * psi * part
        return memory

    return recall


def assert_same_path(ours, theirs):
    for t, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        assert (a - b).abs().max() < 1e-12, f"step {t}: {(a - b).abs().max()}"


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("beta", [1.0, 0.95, 0.9, 0.65, 0.5])
def test_fo_is_dp_sgd_at_sigma_over_beta_with_a_filter(beta, clipping):
    ours, engine, told = train(FO(beta=beta, **FO_SETTINGS), SIGMA, clipping=clipping)

    def filtered(params):
        return Filter(params, lambda _: beta, 8, fo_recall(**FO_SETTINGS))

    theirs, plain, _ = train(DPSGD(), SIGMA / beta, filtered, clipping=clipping)
    assert_same_path(ours, theirs)
    assert (ours[-1] - ours[0]).abs().max() > 0.1
    spent, reference = engine.get_epsilon(1e-5), plain.get_epsilon(1e-5)
    assert spent == pytest.approx(reference, rel=1e-9)
    if beta < 1:
        assert 0 < told[-1]["confidence"][0] < 1
        assert all(score > 0.1 for score in told[-1]["inconsistency"][0])
        assert len(set(told[-1]["weights"][0])) == 7


@pytest.mark.parametrize("beta", [1.0, 0.95, 0.9, 0.65, 0.5])
def test_sma_is_group_wise_dp_sgd_at_sigma_over_beta_with_a_filter(beta):
    ours, engine, told = train(SMA(beta=beta, warmup=20.0, **SMA_SETTINGS), SIGMA)

    def filtered(params):
        return Filter(params, lambda _: beta, 8, sma_recall(**SMA_SETTINGS, warmup=20.0))

    theirs, plain, _ = train(DPSGD(), SIGMA / beta, filtered)
    assert_same_path(ours, theirs)
    assert engine.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=1e-9)
    if beta < 1:
        last = told[-1]
        for group in (0, 2):  # some steps inside the interval, some outside
            assert len({facts["tempering"][group] for facts in told[1:]}) > 20
        assert last["rho"][1] is None and last["tempering"][1] == 0
        assert all(0 < g < 1 for g in last["gate"])
        assert all(min(f["scale"][g] for f in told[1:]) < 0.95 for g in range(3))
        assert all(0 < w < 1 for w in last["warmup"])


@pytest.mark.parametrize("beta", [0.9, 0.5])
def test_the_ablations_are_dp_sgd_at_sigma_over_beta_with_their_filters(beta):
    def uniform(past, params, _):
        return average([1 / len(past)] * len(past), past, range(len(params))) if past else None

    def exponential(past, params, _):
        raw = [0.6 ** (j - 1) for j in range(1, len(past) + 1)]
        return average([a / sum(raw) for a in raw], past, range(len(params))) if past else None

    for method, recall in (
        (Uniform(beta, 5), uniform),
        (Exponential(beta, 5, 0.6), exponential),
        (FO(beta, window=1), lambda *_: None),
        (SMA(beta, window=1), lambda *_: None),
    ):
        ours, *_ = train(method, SIGMA)
        theirs, *_ = train(
            DPSGD(), SIGMA / beta, lambda p, r=recall: Filter(p, lambda _: beta, 5, r)
        )
        assert_same_path(ours, theirs)


def test_a_beta_schedule_is_dp_sgd_at_sigma_over_beta_t_with_a_filter():
    """Releases are kept while beta is 1, so the memory is there when beta falls."""

    def beta(t):
        return 1.0 if t < 10 else 0.95 - 0.4 * (t % 7) / 7

    ours, engine, told = train(FO(beta=beta, **FO_SETTINGS), SIGMA)

    def filtered(params):
        return Filter(params, beta, 8, fo_recall(**FO_SETTINGS))

    theirs, plain, _ = train(DPSGD(), lambda t: SIGMA / beta(t), filtered)
    assert_same_path(ours, theirs)
    assert told[9]["memory_ratio"] == [0.0] and told[10]["memory_ratio"][0] > 0.001
    assert [e.noise_multiplier for e in engine.ledger.events][:2] == pytest.approx(
        [SIGMA, SIGMA / beta(10)]
    )
    assert engine.get_epsilon(1e-5) == pytest.approx(plain.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("method", [FO(beta=1), SMA(beta=1), Uniform(1), PostFM(1), CurrentOnly()])
def test_beta_one_is_bitwise_dp_sgd_and_keeps_no_history(method, clipping):
    ours, engine, _ = train(method, SIGMA, clipping=clipping)
    theirs, *_ = train("dp-sgd", SIGMA, clipping=clipping)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert "memory" not in engine.state_dict()


def test_post_fm_is_charged_at_sigma_and_filters_its_own_inputs():
    """Unlike FO it is not recursive: the memory averages standard releases (equations 13-18)."""
    beta, settings = 0.7, FO_SETTINGS
    ours, engine, _ = train(PostFM(beta, **settings), SIGMA)

    class PostFilter(Filter):
        @torch.no_grad()
        def step(self, closure=None):
            params = self.param_groups[0]["params"]
            memory = self.recall(self.past[: self.window - 1], params, self.time)
            new = [LOT * p.grad for p in params]
            for i, p in enumerate(params):
                move = beta * new[i] + ((1 - beta) * memory[i] if memory else 0)
                p.sub_(LR * move / LOT)
            self.past.insert(0, new)

    theirs, plain, _ = train(
        DPSGD(), SIGMA, lambda p: PostFilter(p, None, 8, fo_recall(**settings))
    )
    assert_same_path(ours, theirs)
    assert engine.ledger.events == plain.ledger.events


def test_the_filter_would_notice_a_wrong_memory():
    """The yardstick itself: a slightly different window or order is seen."""
    ours, *_ = train(FO(beta=0.9, **FO_SETTINGS), SIGMA)
    for change in ({"alpha": 0.61}, {"ema": 0.26}, {"inconsistency": 0.21}):
        settings = FO_SETTINGS | change
        theirs, *_ = train(
            DPSGD(), SIGMA / 0.9, lambda p, s=settings: Filter(p, lambda _: 0.9, 8, fo_recall(**s))
        )
        assert (ours[-1] - theirs[-1]).abs().max() > 1e-9
    settings = copy.deepcopy(FO_SETTINGS)
    theirs, *_ = train(
        DPSGD(), SIGMA / 0.9, lambda p: Filter(p, lambda _: 0.9, 7, fo_recall(**settings))
    )
    assert (ours[-1] - theirs[-1]).abs().max() > 1e-9
