"""Filters of releases: their recursions, their noise, and what they refuse."""

from __future__ import annotations

import math

import pytest
import torch

from tests.support.small_runs import LOT, SIGMA, STEPS, flat, private, run
from vestige import ConfigError
from vestige.methods import FO, Doppler, Kalman
from vestige.updates.ascent import Ascent
from vestige.updates.filters import SECOND_ORDER, DopplerFilter, KalmanFilter, RunningMean


@pytest.mark.parametrize(
    "method", [Doppler(smoothing=0.2), Doppler(order=2), Doppler(smoothing=1.0)]
)
def test_doppler_is_its_recursion(method, seen):
    engine, model, optimizer, loader = private(method)
    given = []
    run(
        engine,
        model,
        optimizer,
        loader,
        after=lambda: given.append(flat(p.grad for p in model.parameters())),
    )
    k = method.smoothing
    a, b = SECOND_ORDER if method.order == 2 else ((k - 1,), (k,))
    outputs, gains = [], []
    for t in range(STEPS):
        m = sum(b[i] * seen[t - i] for i in range(len(b)) if t >= i)
        m = m - sum(a[i - 1] * outputs[t - i] for i in range(1, len(a) + 1) if t >= i)
        c = sum(b[i] for i in range(len(b)) if t >= i)
        c = c - sum(a[i - 1] * gains[t - i] for i in range(1, len(a) + 1) if t >= i)
        outputs.append(m)
        gains.append(c)
        assert torch.allclose(given[t], m / c, rtol=1e-9, atol=1e-9)
    if k == 1.0:
        assert torch.equal(given[3], seen[3])


@pytest.mark.parametrize(
    "coefficients", [((-0.9,), (0.1,)), SECOND_ORDER, ((), (1.0,)), ((), (0.5, 0.5))]
)
def test_a_constant_gradient_passes_doppler_unchanged_from_the_first_step(coefficients):
    filtered = DopplerFilter(torch.zeros(5, dtype=torch.float64), *coefficients)
    values, out = torch.arange(1.0, 6.0, dtype=torch.float64), torch.zeros(5, dtype=torch.float64)
    for _ in range(30):
        filtered.see(values, [1.0], out)
        assert torch.allclose(out, values, rtol=1e-6)


@pytest.mark.parametrize("steps", [1, 3, 60])
@pytest.mark.parametrize(
    "make",
    [
        lambda like: DopplerFilter(like, (-0.7,), (0.3,)),
        lambda like: DopplerFilter(like, (), (0.5, 0.5)),
        lambda like: DopplerFilter(like, *SECOND_ORDER),
        lambda like: RunningMean(like, 0.3),
        lambda like: KalmanFilter(like, [slice(0, len(like))]),
    ],
)
def test_the_noise_power_of_a_filter_is_what_white_noise_shows(make, steps):
    """At every step, while the filter settles too: AdamBC subtracts it."""
    out = torch.zeros(20_000, dtype=torch.float64)
    filtered = make(torch.zeros(20_000, dtype=torch.float64))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        values = torch.randn(20_000, generator=generator, dtype=torch.float64)
        filtered.see(values, [1.0], out)
    assert float(out.square().mean()) == pytest.approx(filtered.noise_powers(1)[0], rel=0.06)


@pytest.mark.parametrize("noise", [1e-12, 1e-9, 1e-6])
def test_kalman_passes_releases_that_are_almost_exact(noise):
    engine, *rest = private(Kalman(), noise_multiplier=noise)
    run(engine, *rest, 6)
    assert min(engine.parts["filter"].gains) > 0.99


def test_kalman_is_its_equations(seen):
    engine, model, optimizer, loader = private(Kalman())
    given = []
    run(
        engine,
        model,
        optimizer,
        loader,
        after=lambda: given.append(flat(p.grad for p in model.parameters())),
    )
    std = SIGMA * 1.0 / LOT
    for start, stop in ((0, 48), (48, 75)):
        estimate, excess = seen[0][start:stop].clone(), []
        for t in range(1, STEPS):
            y, before = seen[t][start:stop], seen[t - 1][start:stop]
            excess.append(float(((y - before) ** 2).mean()) - 2 * std**2)
            r = max(0.0, sum(excess) / len(excess)) / std**2
            k = max((-r + math.sqrt(r * r + 4 * r)) / 2, 1 / (t + 1))
            estimate = estimate + k * (y - estimate)
            assert torch.allclose(given[t][start:stop], estimate, rtol=1e-9, atol=1e-12)


def test_kalman_averages_pure_noise_and_follows_exact_releases():
    engine, model, optimizer, loader = private(Kalman(), sample_rate=1e-12)
    run(engine, model, optimizer, loader, 40)
    assert max(engine.parts["filter"].gains) < 0.5
    engine, model, optimizer, loader = private(Kalman(), noise_multiplier=0.0)
    run(engine, model, optimizer, loader, 4)
    assert engine.parts["filter"].gains == [1.0, 1.0]


@pytest.mark.parametrize("denoiser", ["doppler", "kalman"])
@pytest.mark.parametrize("method", ["fo", "sma", "dp-adam", "dp-sat", "dp-sgd"])
def test_a_denoiser_goes_after_any_method_and_costs_nothing(method, denoiser):
    engine, *rest = private(method, denoiser=denoiser)
    run(engine, *rest, 4)
    bare, *others = private(method)
    run(bare, *others, 4)
    assert engine.ledger.events == bare.ledger.events
    assert engine.plan.settings["denoiser"]["name"] == denoiser
    assert not torch.equal(flat(rest[0].parameters()), flat(others[0].parameters()))


def test_denoisers_that_make_no_sense_are_refused():
    for method, denoiser, message in (
        ("dp-sgd", "dp-adam", "no filter of releases"),
        ("dp-sgd", "disk", "no filter of releases"),
        ("doppler", "kalman", "filters or scales its releases itself"),
        ("post-fm", "kalman", "filters or scales its releases itself"),
        ("dp-sgd", "magic", "unknown"),
    ):
        with pytest.raises(ConfigError, match=message):
            private(method, denoiser=denoiser)


def test_filters_and_ascents_take_releases_only():
    filtered = DopplerFilter(torch.zeros(3), (), (1.0,))
    with pytest.raises(TypeError, match="releases only"):
        filtered.apply(torch.zeros(3), torch.zeros(3))
    with pytest.raises(TypeError, match="releases only"):
        Ascent([], torch.zeros(3), 0.1, False).learn(torch.zeros(3))


def test_a_memory_may_be_filtered_again():
    engine, *rest = private(FO(window=3), denoiser=Doppler(smoothing=0.5))
    run(engine, *rest, 6)
    assert engine.diagnostics()["memory_ratio"][0] > 0
