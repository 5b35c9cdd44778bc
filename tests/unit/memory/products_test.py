"""Expected products of noise, and gates that are freed of it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from tests.support.memory_runs import private, run, weights
from vestige import ConfigError
from vestige.memory.products import NoiseGram
from vestige.memory.rules import View
from vestige.methods import SMA


def test_the_noise_gram_is_that_of_noise_that_is_inherited():
    """Vectors made by N_t = Z_t + sum_j c_j N_(t-j) with changing coefficients and noise."""
    rng = np.random.default_rng(0)
    size, rows, ema = 40_000, 4, 0.3
    expected = NoiseGram(1, rows, ema)
    past, trend = [], None
    for t in range(15):
        coefficients = 0.5 * rng.random((1, min(t, rows))) / rows * 2
        std = 1.0 + (t % 3)
        new = std * rng.normal(size=size)
        for c, old in zip(coefficients[0], past, strict=False):
            new += c * old
        expected.inherit(coefficients, np.array([size * std**2]))
        past = [new, *past][:rows]
        trend = new if trend is None else ema * new + (1 - ema) * trend
    found = np.array([[a @ b for a in past] for b in past])
    view = View(15, found[None], np.array([[trend @ a for a in past]]), np.array([trend @ trend]))
    bare = expected.taken_off(view)
    scale = found.max()
    assert np.abs(bare.gram).max() < 0.02 * scale and np.abs(bare.trend).max() < 0.02 * scale
    assert bare.trend_square[0] < 0.02 * scale
    assert np.abs(found - np.diag(np.diagonal(found))).max() > 0.1 * scale  # much is inherited


def test_debiased_gates_tell_signal_from_noise():
    """With noise alone the ordinary gate is nearly open; the debiased one is nearly shut."""
    gates = {}
    for debias in (False, True):
        for rate, noise in ((1e-12, 1.0), (1.0, 0.01)):
            engine, *rest = private(
                SMA(window=5, debias=debias),
                model=nn.Sequential(nn.Flatten(), nn.Linear(25, 1500), nn.Linear(1500, 3)),
                sample_rate=rate,
                noise_multiplier=noise,
            )
            told = []
            run(
                engine,
                *rest,
                25,
                after=lambda t=told, e=engine: t.append(e.diagnostics()["gate"][0]),
            )
            gates[debias, rate] = float(np.mean(told[10:]))
    assert gates[False, 1e-12] > 0.7
    assert gates[True, 1e-12] < 0.5 * gates[False, 1e-12]
    assert gates[True, 1.0] > 0.8


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_debiased_memory_is_saved_and_continues_bit_for_bit(dtype):
    whole = private(SMA(debias=True), history_dtype=dtype)
    run(*whole, 12)
    first = private(SMA(debias=True), history_dtype=dtype)
    run(*first, 5)
    second = private(SMA(debias=True), history_dtype=dtype)
    second[0].load_state_dict(first[0].state_dict())
    second[1].load_state_dict(first[1].state_dict())
    second[2].load_state_dict(first[2].state_dict())
    run(*second, 7)
    assert torch.equal(weights(second[1]), weights(whole[1]))
    assert second[0].diagnostics() == whole[0].diagnostics()
    with pytest.raises(ConfigError, match="debias="):
        SMA(debias=1)
