"""The shapes of noise that `vestige plan` measures, against dense matrices and nodes by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from scipy.linalg import toeplitz

from tests.support.dense_noise import tree_matrix
from vestige import methods
from vestige.methods import noise_forms
from vestige.methods.noise_forms import Form
from vestige.privacy.factorisation import tree_sensitivity

STEPS = 40
ORDERS_AND_BANDS = [(0.3, 2), (0.5, 8), (0.65, 3), (0.8, 16), (0.9, 40), (0.5, 40)]


def dense(column: Any, steps: int = STEPS) -> Any:
    """The lower-triangular Toeplitz matrix with that first column, padded with zeros."""
    padded = np.zeros(steps)
    padded[: len(column)] = column[:steps]
    return toeplitz(padded, np.zeros(steps))


def check_noise(form: Form, matrix: Any) -> None:
    """`matrix` makes the noise of all steps out of white noise."""
    prefix = np.tril(np.ones((STEPS, STEPS))) @ matrix
    expected = [np.linalg.norm(m) / math.sqrt(STEPS) for m in (prefix, matrix)]
    assert form.noise(STEPS) == pytest.approx(expected, rel=1e-10)
    largest = [np.linalg.norm(m, axis=1).max() for m in (prefix, matrix)]
    assert form.largest(STEPS) == pytest.approx(largest, rel=1e-10)


def fractional_coefficients(order: float, bands: int) -> list[float]:
    """Gamma(k + order) / (Gamma(order) k!), the binomial series, not the recursion."""
    return [math.gamma(k + order) / (math.gamma(order) * math.factorial(k)) for k in range(bands)]


@pytest.mark.parametrize(("order", "bands"), ORDERS_AND_BANDS)
def test_fractional_noise_is_that_of_the_dense_matrices(order: float, bands: int) -> None:
    c = np.array(fractional_coefficients(order, bands))
    check_noise(noise_forms.fractional(order, bands), np.linalg.norm(c) * np.linalg.inv(dense(c)))


@pytest.mark.parametrize(("order", "bands"), ORDERS_AND_BANDS)
def test_lots_of_one_record_do_not_overlap_and_none_exceeds_the_scale(
    order: float, bands: int
) -> None:
    """Why ceil(T / bands) events at the multiplier of the row are the whole cost."""
    form = noise_forms.fractional(order, bands)
    scaled = dense(form.denominator) / form.gain
    gram = scaled.T @ scaled
    assert np.diag(gram).max() <= 1 + 1e-12
    for group in range(bands):
        block = gram[group::bands, group::bands]
        assert np.abs(block - np.diag(np.diag(block))).max() == 0


def test_order_one_half_is_the_square_root_of_the_prefix_sums() -> None:
    c = dense(noise_forms.fractional(0.5, STEPS).denominator)
    np.testing.assert_allclose(c @ c, np.tril(np.ones((STEPS, STEPS))), atol=1e-12)


@pytest.mark.parametrize("order", [0.3, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("steps", [1, 2, 2500])
def test_one_band_is_dp_sgd_exactly(order: float, steps: int) -> None:
    noise = noise_forms.fractional(order, 1).noise(steps)
    assert noise == noise_forms.dp_sgd().noise(steps)
    assert noise == pytest.approx((math.sqrt((steps + 1) / 2), 1.0), rel=1e-13)


@pytest.mark.parametrize("turns", [1, 7, 40])
@pytest.mark.parametrize("bands", [2, 8, 64])
def test_a_banded_inverse_is_that_of_the_dense_matrices(bands: int, turns: int) -> None:
    """sqrt(1 - z) by its binomial series; the sum of the columns of the inverse, densely."""
    series = [math.prod((j - 0.5) / (j + 1) for j in range(k)) for k in range(bands)]
    kept = dense(series)
    sensitivity = np.linalg.norm(np.linalg.inv(kept)[:, ::turns].sum(axis=1))
    check_noise(noise_forms.banded_inverse(bands, STEPS, turns), sensitivity * kept)


@pytest.mark.parametrize("steps", [1, 2, 5, 13, 16])
@pytest.mark.parametrize("period", [1, 4, 30])
def test_a_tree_is_that_of_its_nodes(steps: int, period: int) -> None:
    rows, _ = tree_matrix(steps, True, steps)
    rows = rows * math.sqrt(tree_sensitivity(steps, period))
    norms = [np.linalg.norm(m, axis=1) for m in (np.cumsum(rows, axis=0), rows)]
    form = noise_forms.tree(steps, period)
    means = [math.sqrt(np.mean(each**2)) for each in norms]
    assert form.noise(steps) == pytest.approx(means, rel=1e-12)
    assert form.largest(steps) == pytest.approx([each.max() for each in norms], rel=1e-12)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_momentum_is_that_of_the_dense_matrices(decay: float) -> None:
    form = noise_forms.momentum(decay)
    check_noise(form, dense([(1 - decay) * decay**k for k in range(STEPS)]))
    assert form.delay == pytest.approx(decay / (1 - decay))


@pytest.mark.parametrize(
    "method",
    [methods.FO(), methods.SMA(), methods.FO(beta=0.5, window=32), methods.FO(window=2)],
    ids=str,
)
def test_memory_is_that_of_the_dense_recursion(method: Any) -> None:
    lags = range(1, method.window)
    weights = np.array([0.0, *((j + 1) ** (method.alpha - 1) for j in lags)])
    past = dense(weights / weights.sum())
    matrix = method.beta * np.linalg.inv(np.eye(STEPS) - (1 - method.beta) * past)
    form = noise_forms.memory(method)
    check_noise(form, matrix)
    response = form.response(5000)
    assert response.sum() == pytest.approx(1)
    assert form.delay == pytest.approx(response @ np.arange(5000))


@pytest.mark.parametrize(
    ("beta", "power", "delay", "accumulated"),
    [(0.9, 0.811, 0.42, 15.80), (0.5, 0.267, 3.82, 15.62)],
)
def test_the_published_figures_of_fo(
    beta: float, power: float, delay: float, accumulated: float
) -> None:
    form = noise_forms.memory(methods.FO(beta=beta, alpha=0.8, window=8))
    assert float((form.response(5000) ** 2).sum()) == pytest.approx(power, abs=5e-4)
    assert form.delay == pytest.approx(delay, abs=5e-3)
    assert form.noise(500)[0] == pytest.approx(accumulated, abs=5e-3)


def test_a_hundred_thousand_steps_do_not_blow_up() -> None:
    """The response of 1 / c(z) settles at 1 / c(1), so the accumulated noise grows as sqrt(T)."""
    form = noise_forms.fractional(0.5, 64)
    far, near = form.noise(100_000)[0], form.noise(25_000)[0]
    assert far / near == pytest.approx(2, rel=0.02)
    settled = form.gain / form.denominator.sum()
    assert far == pytest.approx(settled * math.sqrt(100_001 / 2), rel=0.02)
