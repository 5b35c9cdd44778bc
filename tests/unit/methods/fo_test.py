"""Algorithm 1 of the FO-DP-SGD paper (arXiv 2605.09890) and its baselines, equation by equation."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.memory_helpers import (
    BOUND,
    LOT,
    N,
    assert_close,
    fo_memory,
    history_of,
    mixture,
    normalised,
    normals,
    properties,
    simulate,
    train,
    transcripts,
    trend,
)
from vestige.memory.rules import power_law
from vestige.methods import FO, Exponential, PostFM, Uniform

BETA, SIGMA = 0.7, 1.3
FULL = FO(beta=BETA, window=5, tempering=0.2, inconsistency=0.4, min_scale=0.05, confidence=0.3)


def uniform_memory(past, method):
    """Equation 24."""
    lags = min(method.window, len(past) + 1) - 1
    return mixture([1 / lags] * lags, past)


def exponential_memory(past, method):
    """Equations 26 and 27."""
    lags = range(1, min(method.window, len(past) + 1))
    return mixture(normalised([method.decay ** (j - 1) for j in lags]), past)


@pytest.mark.parametrize(
    ("method", "memory"),
    [
        (FULL, fo_memory),
        (FO(beta=BETA, window=2), fo_memory),
        (replace(FULL, min_scale=5.0), fo_memory),
        (Uniform(beta=BETA, window=5), uniform_memory),
        (Exponential(beta=BETA, window=5), exponential_memory),
        (PostFM(**FULL.settings()), fo_memory),
    ],
    ids=["fo", "one lag", "trend below the floor", "uniform", "exponential", "post-fm"],
)
def test_algorithm_1_and_equations_13_to_28_step_by_step(method, memory):
    """Releases and weights of 20 steps are those of the equations, written out on their own."""
    post = isinstance(method, PostFM)
    tape = train(method, 20, noise_multiplier=SIGMA)
    releases, weights = simulate(
        lambda past, _: (1 - BETA) * memory(past, method) if past else 0.0,
        20,
        BETA,
        stds=(SIGMA * BOUND,),
        post=post,
    )
    for step, expected in zip(tape, releases, strict=True):
        assert_close(step.release, expected)
    assert_close(tape.weights, weights)
    assert tape.events == [(LOT / N, SIGMA if post else SIGMA / BETA)] * 20


def test_equations_13_to_18_the_post_processing_baseline_keeps_the_query_of_dp_sgd():
    """Post-FM releases s + Z, charged at sigma, and moves by beta g~_t + (1-beta) u_(t-1)."""
    method = PostFM(**FULL.settings())
    tape = train(method, noise_multiplier=SIGMA)
    for t, step in enumerate(tape):
        assert step.silent
        assert step.gain == 1
        assert_close(step.release, step.sum + SIGMA * BOUND * normals(t, step.sum))
        memory = fo_memory(tape.releases[:t], method)
        assert_close(step.gradient, (BETA * step.release + (1 - BETA) * memory) / LOT)


@given(st.integers(1, 40), st.floats(0.01, 1), st.floats(0, 1e6))
@properties
def test_equation_8_ratios_of_normalised_weights_are_ratios_of_raw_ones(lags, alpha, tempering):
    """a_j / a_k is what it was before normalising, however strong the tempering."""
    j = np.arange(1, lags + 1.0)
    weights = power_law(j, alpha, tempering)
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    expected = ((j + 1) / 2) ** (alpha - 1) * np.exp(-tempering * (j - 1))
    assert weights / weights[0] == pytest.approx(expected, rel=1e-9, abs=1e-300)


def test_equation_9_nothing_is_recalled_before_the_first_release():
    """K_0 = 1: u = 0, so step 0 releases beta s_0 + Z_0 and is charged at sigma/beta like all."""
    tape = train(FULL, 1)
    (step,) = tape
    assert step.silent
    assert step.kernel(0) == []
    assert_close(step.release, BETA * step.sum + BOUND * normals(0, step.sum))
    assert tape.events == [(LOT / N, 1 / BETA)]


@given(transcripts(), st.integers(2, 8), st.floats(0.01, 1.0))
@properties
def test_equations_4_to_6_read_the_inner_products_of_releases_and_trend(past, window, ema):
    """The Gram matrix that scores and confidence come from is that of the vectors themselves."""
    view = history_of(past, window, ema).view()
    newest, mu = past[:-window:-1], trend(past, ema)
    square = max(float(vector.norm()) for vector in past) ** 2
    assert view.step == len(past)
    for i, a in enumerate(newest):
        products = [float(a @ b) for b in newest]
        assert view.gram[0, i] == pytest.approx(products, rel=0, abs=1e-14 * square)
    products = [float(a @ mu) for a in newest]
    assert view.trend[0] == pytest.approx(products, rel=0, abs=1e-14 * square)
    assert view.trend_square[0] == pytest.approx(float(mu @ mu), rel=0, abs=1e-14 * square)
