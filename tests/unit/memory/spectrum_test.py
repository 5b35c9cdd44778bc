"""Spectral exponents: plain loops, closed forms, other packages, edge cases, the command."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from vestige import ConfigError
from vestige.memory import spectrum
from vestige.memory.spectrum import ESTIMATORS, exponent, exponents, fit, tempering

SHAPES = [
    (64, 3072),
    (32, 64),
    (10, 32),
    (64, 64),
    (200, 90),
    (90, 200),
    (16, 8, 3, 3),
    (40, 3, 5, 5),
    (12, 7, 3),
    (6, 2, 3, 3, 3),
    (3, 5),
]
BOTH = ("hill", "clauset")


def weight(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def spread_out(values: Any, rows: int | None = None, seed: int = 0) -> Tensor:
    """A float64 matrix whose W W^T has these eigenvalues, in a random basis."""
    values = torch.as_tensor(np.asarray(values), dtype=torch.float64)
    n, generator = len(values), torch.Generator().manual_seed(seed)
    left = torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64))[0]
    wide = torch.randn(rows or n, n, generator=generator, dtype=torch.float64)
    return left @ torch.diag(values.sqrt()) @ torch.linalg.qr(wide)[0].T


def eigenvalues(weight: Tensor) -> list[float]:
    """By singular values, ascending, after the cut."""
    matrix = weight.detach().double().reshape(weight.shape[0], -1)
    values = sorted((torch.linalg.svdvals(matrix) ** 2).tolist())
    return [x for x in values if x >= 1e-10 * values[-1]]


def distance(tail: list[float], rho: float) -> float:
    n, xmin = len(tail), tail[0]
    return max(abs(1 - (x / xmin) ** (1 - rho) - j / n) for j, x in enumerate(tail))


def loop_hill(values: list[float], tail: float = 0.5) -> tuple[float, float, int, float]:
    top = values[len(values) - math.ceil(tail * len(values)) :]
    rho = 1 + len(top) / sum(math.log(x / top[0]) for x in top)
    return rho, top[0], len(top), distance(top, rho)


def loop_clauset(values: list[float]) -> tuple[float, float, int, float]:
    best = (math.nan, math.nan, 0, math.inf)
    for i in range(len(values) - 1):
        top = values[i:]
        rho = 1 + len(top) / sum(math.log(x / top[0]) for x in top)
        found = distance(top, rho)
        if found < best[3]:
            best = rho, top[0], len(top), found
    return best


def figures(weight: Tensor, estimator: str, tail: float = 0.5) -> tuple[float, float, int, float]:
    found = fit(weight, estimator, tail)
    assert found is not None
    assert found.exponent == exponent(weight, estimator, tail)
    return found.exponent, found.xmin, found.tail_size, found.ks_distance


# -- against plain loops --------------------------------------------------------------------


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_both_estimators_are_the_plain_loops(shape: tuple[int, ...]) -> None:
    w = weight(*shape)
    values = eigenvalues(w)
    assert figures(w, "clauset") == pytest.approx(loop_clauset(values), rel=1e-9)
    for tail in (0.1, 0.3, 0.5, 0.77, 1.0):
        if math.ceil(tail * len(values)) > 1:
            assert figures(w, "hill", tail) == pytest.approx(loop_hill(values, tail), rel=1e-9)
    found = fit(w)
    assert found is not None
    assert found.eigenvalues.dtype == np.float64
    assert found.eigenvalues.tolist() == pytest.approx(values, rel=1e-9)
    assert found.eigenvalues[-found.tail_size] == found.xmin


@pytest.mark.parametrize("n", [2, 3, 19, 20, 257, 1000])
@pytest.mark.parametrize("seed", range(3))
def test_the_search_is_the_loop_on_heavy_tails_of_any_size(n: int, seed: int) -> None:
    values = np.sort(np.random.default_rng(seed).pareto(1.7, n) + 0.3)
    assert figures(torch.diag(torch.tensor(values).sqrt()), "clauset") == pytest.approx(
        loop_clauset(values.tolist()), rel=1e-9
    )


@pytest.mark.parametrize("estimator", BOTH)
@pytest.mark.parametrize("tail", [0.5, 1.0])
@pytest.mark.parametrize("lowest", [1e-3, 1e-6, 1e-8, 2e-10])
def test_small_eigenvalues_are_as_exact_as_singular_values(
    lowest: float, tail: float, estimator: str
) -> None:
    """Above the cut a Gram matrix alone would be off by up to 1e-6."""
    for seed in range(5):
        random = np.random.default_rng(seed)
        spectrum_ = lowest ** np.sort(random.random(40))
        spectrum_[[0, -1]] = lowest, 1
        w = spread_out(spectrum_, rows=60, seed=seed)
        values = eigenvalues(w)
        assert len(values) == 40
        loop = loop_hill(values, tail) if estimator == "hill" else loop_clauset(values)
        assert figures(w, estimator, tail) == pytest.approx(loop, rel=1e-8)


@pytest.mark.parametrize("estimator", BOTH)
def test_rounding_in_a_matrix_of_low_rank_is_dropped(estimator: str) -> None:
    low = weight(30, 12, seed=1) @ weight(12, 80, seed=2)
    found = fit(low, estimator)
    assert found is not None
    assert len(found.eigenvalues) == 12
    exact = weight(30, 12, seed=1).double() @ weight(12, 80, seed=2).double()
    assert found.exponent == pytest.approx(exponent(exact, estimator), rel=1e-4)


def test_an_eigenvalue_near_the_cut_counts_when_it_is_above() -> None:
    for seed in range(10):
        for factor, kept in ((1.0001, 21), (0.9999, 20), (1 + 1e-8, 21), (1 - 1e-8, 20)):
            w = spread_out([1e-10 * factor, *np.linspace(0.1, 1, 20)], rows=50, seed=seed)
            found = fit(w)
            assert found is not None
            assert len(found.eigenvalues) == kept
            assert found.tail_size == math.ceil(kept / 2)


def test_the_search_keeps_its_memory_small() -> None:
    values = np.sort(np.random.default_rng(0).pareto(2.0, 4608) + 1)
    tracemalloc.start()
    try:
        assert spectrum._search(values, watcher=False) is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 20e6  # the whole square of distances would take 170 MB


# -- closed forms and invariances -----------------------------------------------------------


@pytest.mark.parametrize("rho", [1.5, 2.0, 3.0, 4.5, 8.0])
def test_pareto_quantiles_are_recovered(rho: float) -> None:
    for n, tolerance in ((100, 0.05), (600, 0.015)):
        quantiles = (1 - (np.arange(n) + 0.5) / n) ** (-1 / (rho - 1))
        w = torch.diag(torch.tensor(quantiles).sqrt())
        assert exponent(w, tail=1.0) == pytest.approx(rho, rel=tolerance)
        assert exponent(w) == pytest.approx(rho, rel=2 * tolerance)
        assert exponent(w, "clauset") == pytest.approx(rho, rel=3 * tolerance)


@pytest.mark.parametrize("k", [2, 5, 40])
@pytest.mark.parametrize("ratio", [1.001, 1.2, 1.3])
def test_geometric_eigenvalues_have_a_closed_form(k: int, ratio: float) -> None:
    values = torch.tensor([ratio**i for i in range(2 * k)], dtype=torch.float64)
    expected = 1 + 2 / ((k - 1) * math.log(ratio))
    assert exponent(torch.diag(values.sqrt())) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("estimator", BOTH)
@pytest.mark.parametrize("shape", [(30, 50), (100, 70), (8, 4, 3, 3)], ids=str)
def test_scale_rotation_transposition_and_order_change_nothing(
    shape: tuple[int, ...], estimator: str
) -> None:
    w = weight(*shape, dtype=torch.float64).reshape(shape[0], -1)
    before = exponent(w, estimator)
    assert before is not None
    for scale in (1e-120, 1e-6, -1.0, 37.5, 1e120):
        assert exponent(scale * w, estimator) == pytest.approx(before, rel=1e-10)
    left = torch.linalg.qr(weight(w.shape[0], w.shape[0], seed=1, dtype=torch.float64))[0]
    right = torch.linalg.qr(weight(w.shape[1], w.shape[1], seed=2, dtype=torch.float64))[0]
    assert exponent(left @ w @ right, estimator) == pytest.approx(before, rel=1e-9)
    assert exponent(w.T, estimator) == pytest.approx(before, rel=1e-9)
    assert exponent(w.flip(0, 1), estimator) == pytest.approx(before, rel=1e-9)
    padded = nn.functional.pad(w, (0, 3, 0, 2))  # zero rows and columns are zero eigenvalues
    assert exponent(padded, estimator) == pytest.approx(before, rel=1e-9)


def test_a_convolution_is_its_reshaped_matrix() -> None:
    w = weight(16, 8, 3, 3)
    for estimator in BOTH:
        assert exponent(w, estimator) == exponent(w.reshape(16, 72), estimator)
        layout = w.to(memory_format=torch.channels_last)
        assert exponent(layout, estimator) == pytest.approx(exponent(w, estimator), rel=1e-12)
    assert exponent(w, "weightwatcher") != exponent(w.reshape(16, 72), "weightwatcher")


def test_a_share_of_the_eigenvalues_is_rounded_up_but_not_by_rounding_errors() -> None:
    values = torch.linspace(1, 2, 100, dtype=torch.float64)
    for tail, size in ((0.07, 7), (0.29, 29), (0.071, 8), (0.5, 50), (1.0, 100), (0.011, 2)):
        found = fit(torch.diag(values), tail=tail)
        assert found is not None
        assert found.tail_size == size


def test_tempering() -> None:
    for rho in (None, 2.0, 2.1, 4.0, 6.0):
        assert tempering(rho) == 0
    assert tempering(7.0) == tempering(1.0) == pytest.approx(1 - math.exp(-1))
    assert tempering(5.0, (2.0, 4.5), rate=3.0) == pytest.approx(1 - math.exp(-1.5))
    assert tempering(1e5) == 1
    assert tempering(6 + 1e-12) == pytest.approx(1e-12, rel=1e-3)


# -- several weights ------------------------------------------------------------------------


def broken_and_whole() -> list[Tensor]:
    bad = weight(64, 100, seed=9)
    bad[3, 4] = math.nan
    worse = weight(100, 90, seed=9)
    worse[0, 0], worse[5, 5] = math.inf, -math.inf
    shapes = [(64, 100), (100, 64), (100, 90), (90, 300), (16, 8, 3, 3), (10, 5), (0, 5), (1, 9)]
    whole = [weight(*shape, seed=i) for i, shape in enumerate(shapes)]
    return [*whole[:3], bad, *whole[3:], worse, torch.zeros(64, 70), weight(64, 100, seed=20)]


def check_alike(found: list[float | None], expected: list[float | None]) -> None:
    for rho, other in zip(found, expected, strict=True):
        assert rho == (None if other is None else pytest.approx(other, rel=1e-9))


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_many_at_once_are_the_same_as_one_at_a_time(estimator: str) -> None:
    weights = broken_and_whole()
    together = exponents(weights, estimator)
    assert together == [exponent(w, estimator) for w in weights]
    assert sum(rho is None for rho in together) >= 5
    assert sum(rho is not None for rho in together) >= 5
    assert exponents([], estimator) == []
    assert exponents(tuple(weights), estimator) == together


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_batched_way_of_large_and_remote_weights_is_the_same(
    estimator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = broken_and_whole()
    before = exponents(weights, estimator)
    monkeypatch.setattr(spectrum, "_SINGLE_THREAD", 0)
    check_alike(exponents(weights, estimator), before)
    monkeypatch.setattr(spectrum, "_SINGLE_THREAD", 10**9)
    check_alike(exponents(weights, estimator), before)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU here")
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_on_a_gpu_the_results_are_the_same(estimator: str) -> None:
    weights = broken_and_whole()
    here = exponents(weights, estimator)
    check_alike(exponents([w.cuda() for w in weights], estimator), here)
    mixed = [w if i % 2 else w.cuda() for i, w in enumerate(weights)]
    check_alike(exponents(mixed, estimator), here)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_nothing_else_is_touched(estimator: str) -> None:
    weights = [nn.Parameter(w) for w in broken_and_whole()]
    copies, versions = [w.detach().clone() for w in weights], [w._version for w in weights]
    torch.manual_seed(5)
    np.random.seed(5)
    state, threads = torch.get_rng_state(), torch.get_num_threads()
    numpy_state = np.random.get_state()[1].tolist()
    for rho in exponents(weights, estimator):
        assert rho is None or type(rho) is float
    found = fit(weights[0], estimator)
    assert found is not None
    with pytest.raises(ValueError, match="read-only"):
        found.eigenvalues[0] = 1
    assert torch.equal(torch.get_rng_state(), state)
    assert np.random.get_state()[1].tolist() == numpy_state
    assert torch.get_num_threads() == threads
    assert [w._version for w in weights] == versions
    for w, copy in zip(weights, copies, strict=True):
        assert torch.equal(w, copy) or bool(copy.isnan().any())
        assert w.requires_grad
        assert w.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_precisions_are_taken_as_they_are(dtype: torch.dtype) -> None:
    for w in (weight(20, 30).to(dtype), weight(80, 90).to(dtype)):
        for estimator in BOTH:
            assert exponent(w, estimator) == pytest.approx(
                exponent(w.double(), estimator), rel=1e-12
            )
        rounded = exponent(w.float(), "weightwatcher")
        assert exponent(w, "weightwatcher") == pytest.approx(rounded, rel=1e-12)


# -- weightwatcher and powerlaw themselves --------------------------------------------------


@pytest.fixture(scope="module")
def watcher() -> ModuleType:
    if torch.cuda.is_available():
        pytest.skip("on a machine with a GPU weightwatcher rounds the weights to float16")
    with warnings.catch_warnings():  # it silences all warnings when it is imported
        return importlib.import_module("weightwatcher")


def watched(watcher: ModuleType, module: nn.Module) -> tuple[float, float, int, float] | None:
    """What weightwatcher says about one layer; None if it leaves it out or fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its calls of pandas are out of date
        details = watcher.WeightWatcher().analyze(model=nn.Sequential(module))
    if not len(details) or details.status[0] != "success":
        return None
    row = details.iloc[0]
    return row.alpha, row.xmin, row.num_pl_spikes, row.D


def check_watched(watcher: ModuleType, module: nn.Module) -> bool:
    expected = watched(watcher, module)
    parameter = next(module.parameters())
    if expected is None:
        assert fit(parameter, "weightwatcher") is None
        assert exponent(parameter, "weightwatcher") is None
        return False
    assert figures(parameter, "weightwatcher") == pytest.approx(expected, rel=1e-9)
    return True


LAYERS: dict[str, Callable[[], nn.Module]] = {
    **{f"linear {n}x50": lambda n=n: nn.Linear(50, n) for n in (8, 9, 12, 19, 20, 21, 49, 50, 70)},
    "wide": lambda: nn.Linear(3072, 64),
    "tall": lambda: nn.Linear(16, 400),
    "embedding": lambda: nn.Embedding(300, 24),
    "conv 3x3": lambda: nn.Conv2d(16, 32, 3),
    "conv 3x3, more in": lambda: nn.Conv2d(40, 12, 3),
    "conv of images": lambda: nn.Conv2d(3, 64, 3),
    "conv 1x1": lambda: nn.Conv2d(64, 128, 1),
    "conv 2x2, more in": lambda: nn.Conv2d(8, 4, 2),
    "conv 2x2, four eigenvalues": lambda: nn.Conv2d(8, 1, 2),
    "conv 7x7, one in": lambda: nn.Conv2d(1, 2, 7),
    "conv 7x7, one out": lambda: nn.Conv2d(2, 1, 7),
    "conv 1x9": lambda: nn.Conv2d(4, 6, (1, 9)),
    "depthwise": lambda: nn.Conv2d(12, 12, 3, groups=12),
    "conv 512": lambda: nn.Conv2d(128, 96, 3),
    "conv in one dimension": lambda: nn.Conv1d(16, 32, 9),
    "conv in one dimension, more": lambda: nn.Conv1d(40, 25, 30),
}
LEFT_OUT: dict[str, Callable[[], nn.Module]] = {
    "seven eigenvalues": lambda: nn.Linear(50, 7),
    "seven of a convolution": lambda: nn.Conv2d(9, 7, 1),
    "too many": lambda: nn.Conv2d(520, 600, (1, 29)),
    "too many by a wrong count": lambda: nn.Conv2d(1024, 4, 4),
    "too long": lambda: nn.Linear(50_001, 8),
    "conv in one dimension": lambda: nn.Conv1d(16, 32, 3),
    "conv in three dimensions": lambda: nn.Conv3d(8, 9, 3),
}


@pytest.mark.parametrize("layer", LAYERS)
def test_weightwatcher_says_the_same(layer: str, watcher: ModuleType) -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        assert check_watched(watcher, LAYERS[layer]())


@pytest.mark.parametrize("layer", LEFT_OUT)
def test_what_weightwatcher_leaves_out_has_no_exponent(layer: str, watcher: ModuleType) -> None:
    assert not check_watched(watcher, LEFT_OUT[layer]())


@pytest.mark.parametrize("heavy", [0.7, 1.5, 4.0])
@pytest.mark.parametrize("n", [8, 13, 19, 20, 60])
def test_weightwatcher_says_the_same_of_heavy_tails(
    n: int, heavy: float, watcher: ModuleType
) -> None:
    for seed in range(4):
        values = np.random.default_rng(seed).pareto(heavy, n) + 0.01
        layer = nn.Linear(n, n)
        layer.weight.data = spread_out(values, seed=seed).float()
        assert check_watched(watcher, layer)


def test_weightwatcher_says_the_same_below_and_near_its_threshold(watcher: ModuleType) -> None:
    outcomes = []
    for scale in (1.0, 1e-2, 3e-3, 2e-3, 1.5e-3, 1.3e-3, 1e-3, 6e-4, 5e-4, 4e-4, 1e-4):
        layer, convolution = nn.Linear(40, 25), nn.Conv2d(6, 5, 3)
        layer.weight.data = weight(25, 40) * scale
        convolution.weight.data = weight(5, 6, 3, 3) * scale
        outcomes += [check_watched(watcher, layer), check_watched(watcher, convolution)]
    assert outcomes[0] and outcomes[1]
    assert not outcomes[-1] and not outcomes[-2]


def test_weightwatcher_rounds_float64_weights(watcher: ModuleType) -> None:
    layer = nn.Linear(40, 30)
    layer.weight.data = torch.randn(30, 40, dtype=torch.float64)
    assert check_watched(watcher, layer)
    assert exponent(layer.weight, "weightwatcher") == exponent(
        layer.weight.float(), "weightwatcher"
    )


@pytest.mark.parametrize("heavy", [1.2, 2.5, 6.0])
@pytest.mark.parametrize("n", [10, 100, 400])
def test_powerlaw_says_the_same(n: int, heavy: float) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        powerlaw = importlib.import_module("powerlaw")
        values = np.random.default_rng(n).pareto(heavy, n) + 1
        # Without a range of its own it stops at an exponent of 3.
        other = powerlaw.Fit(values, verbose=0, parameter_ranges={"alpha": [1, 1e6]})
    tail = int((values >= other.xmin).sum())
    assert figures(torch.diag(torch.tensor(values).sqrt()), "clauset") == pytest.approx(
        (other.alpha, other.xmin, tail, other.D), rel=1e-6
    )


# -- edges ----------------------------------------------------------------------------------


def without_spread() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {
        "zeros": torch.zeros(30, 40),
        "empty": torch.zeros(0, 40),
        "no columns": torch.zeros(40, 0),
        "no kernel": torch.zeros(8, 8, 0, 3),
        "one row": torch.ones(1, 40),
        "one column": weight(40, 1),
        "one number": torch.ones(1, 1),
        "rank one": torch.outer(torch.arange(1.0, 31), torch.arange(1.0, 41)),
        "identity": torch.eye(30),
        "multiple of it": 0.3 * torch.eye(30),
        "orthogonal": nn.init.orthogonal_(torch.empty(30, 40)),
        "large and orthogonal": nn.init.orthogonal_(torch.empty(300, 300)),
        "too small to square": 1e-160 * weight(30, 40, dtype=torch.float64),
        "too large to square": 1e200 * weight(30, 40, dtype=torch.float64),
        "nan": weight(30, 40).index_fill(1, torch.tensor([3]), math.nan),
        "inf": weight(30, 40).index_fill(0, torch.tensor([3]), math.inf),
        "both": weight(300, 70)
        .index_fill(0, torch.tensor([3]), math.inf)
        .index_fill(1, torch.tensor([1]), -math.inf),
        "nan in a convolution": weight(8, 8, 3, 3).index_fill(2, torch.tensor([1]), math.nan),
    }


@pytest.mark.parametrize("name", without_spread())
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_without_two_spread_eigenvalues_there_is_no_exponent(estimator: str, name: str) -> None:
    w = without_spread()[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exponents([w, w], estimator) == [None, None]
        assert fit(w, estimator) is None
    assert tempering(exponent(w, estimator)) == 0


def test_no_spread_means_a_mean_log_ratio_within_the_rounding_of_float32() -> None:
    for step, known in ((1e-3, True), (3e-5, True), (1e-6, False), (1e-9, False), (0.0, False)):
        values = torch.tensor([1 + step * i for i in range(4)] * 2, dtype=torch.float64)
        w = torch.diag(values.sqrt())
        for estimator in BOTH:
            rho = exponent(w, estimator)
            assert (rho is not None) == known
            assert rho is None or rho < 1.1e5


def test_equal_eigenvalues_on_top_only() -> None:
    """hill sees no spread in its tail; the search finds another one."""
    w = torch.diag(torch.tensor([1.0, 2, 3, 4, 5, 5, 5, 5, 5, 5], dtype=torch.float64).sqrt())
    assert exponent(w) is None
    found = fit(w, "clauset")
    assert found is not None
    assert found.tail_size > 6
    assert exponent(w, tail=0.8) is not None


def test_two_eigenvalues() -> None:
    w = torch.diag(torch.tensor([1.0, 4.0], dtype=torch.float64).sqrt())
    assert exponent(w) is None  # half of two is one
    assert exponent(w, tail=0.51) == pytest.approx(1 + 2 / math.log(4))
    found = fit(w, "clauset")
    assert found is not None
    assert (found.exponent, found.tail_size) == (pytest.approx(1 + 2 / math.log(4)), 2)
    assert found.ks_distance == pytest.approx(0.5 - math.exp(-2))


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_never_nan(data: st.DataObject) -> None:
    shapes = st.one_of(
        st.tuples(st.integers(0, 9), st.integers(0, 12)),
        st.tuples(*[st.integers(0, 4)] * 3),
        st.tuples(*[st.integers(0, 3)] * 4),
    )
    shape = data.draw(shapes)
    dtype = data.draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    numbers = st.one_of(
        st.sampled_from([0.0, 1.0, -1.0, 1e-30, 1e30]),
        st.floats(width=32),
        st.floats(-1, 1, width=32),
    )
    size = math.prod(shape)
    flat = data.draw(st.lists(numbers, min_size=size, max_size=size))
    w = torch.tensor(flat, dtype=torch.float64).reshape(shape).to(dtype)
    tail = data.draw(st.floats(0, 1, exclude_min=True))
    for estimator in ESTIMATORS:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            rho = exponent(w, estimator, tail)
            found = fit(w, estimator, tail)
        assert (rho is None) == (found is None)
        assert 0 <= tempering(rho) <= 1
        if found is not None:
            assert rho == found.exponent
            assert 1 < rho < 1.1e5
            assert 0 <= found.ks_distance <= 1
            assert 2 <= found.tail_size <= len(found.eigenvalues)
            assert found.xmin > 0
            assert np.isfinite(found.eigenvalues).all()
            assert (np.diff(found.eigenvalues) >= 0).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: exponent(weight(3, 4), "mle"), "estimator 'mle' is unknown: choose one of hill"),
        (lambda: exponents([], "mle"), "estimator 'mle'"),
        (lambda: fit(weight(3, 4), tail=0), r"tail 0 is not in \(0, 1\]: give the share"),
        (lambda: exponent(weight(3, 4), tail=1.5), "tail 1.5"),
        (lambda: exponent(weight(3, 4), tail=-0.5), "tail -0.5"),
        (lambda: exponent(weight(3, 4), tail=math.nan), "tail nan"),
        (lambda: exponent(weight(3, 4), "clauset", tail=7.0), "tail 7.0"),
        (lambda: exponent(weight(3, 4), tail="half"), "tail 'half'"),
        (lambda: exponent(weight(3, 4), tail=True), "tail True"),
        (lambda: exponent(weight(3)), r"shape \(3,\): a spectrum needs two or more dim.*leave out"),
        (lambda: exponents([weight(3, 4), torch.tensor(1.0)]), r"shape \(\)"),
        (lambda: exponent(torch.ones(3, 4, dtype=torch.int64)), "dtype torch.int64.*convert"),
        (lambda: exponent(torch.ones(3, 4, dtype=torch.complex64)), "dtype torch.complex64"),
        (lambda: exponent(torch.ones(3, 4, dtype=torch.bool)), "dtype torch.bool"),
        (lambda: exponent(np.ones((3, 4))), "is a ndarray: pass torch tensors"),
    ],
)
def test_bad_arguments_are_named(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        call()
    assert isinstance(caught.value, ValueError)


def test_the_names_and_checks_need_neither_torch_nor_numpy() -> None:
    program = (
        "import sys\n"
        "from vestige import spectrum\n"
        "from vestige.lab import spectrum_report\n"
        "spectrum.check('hill', 0.5), spectrum.tempering(7.0)\n"
        "spectrum_report.Request(target='mlp')\n"
        "print({'torch', 'numpy', 'matplotlib'} & set(sys.modules))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert ran.stdout == "set()\n"


# -- the command ----------------------------------------------------------------------------


@pytest.fixture
def _in_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")  # the command sets it: undone after the test
