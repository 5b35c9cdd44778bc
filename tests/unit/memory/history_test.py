"""The ring of releases: inner products, precision, size, and what it refuses."""

from __future__ import annotations

import copy
import math

import numpy as np
import pytest
import torch

from tests.support.memory_runs import private, releases, run, weights
from vestige import ConfigError
from vestige.memory.history import History, Keeping
from vestige.methods import FO


@pytest.mark.parametrize("ema", [0.3, 1.0])
@pytest.mark.parametrize("window", [2, 3, 8])
def test_the_gram_matrix_and_the_trend_are_those_of_the_releases(window, ema):
    stream, groups = releases(20, parts=3)
    history = History(groups.segments(), groups.buffer(), window, ema)
    past, trend = [], None
    for release in stream:
        history.append(release)
        past.insert(0, release.values.clone())
        trend = past[0] if trend is None else ema * past[0] + (1 - ema) * trend
        kept = past[: window - 1]
        view = history.view()
        assert (view.step, history.depth) == (len(past), len(kept))
        for g, part in enumerate(groups.segments()):
            rows = torch.stack([s[part] for s in kept])
            assert np.allclose(view.gram[g], (rows @ rows.T).numpy(), rtol=1e-12, atol=1e-12)
            assert np.allclose(view.trend[g], (rows @ trend[part]).numpy(), atol=1e-11)
            assert view.trend_square[g] == pytest.approx(float(trend[part] @ trend[part]))
            assert history.release_norms()[g] == pytest.approx(float(past[0][part].norm()))
        factors = np.arange(1.0, 3 * len(kept) + 1).reshape(3, len(kept))
        branch = history.mix(factors)
        assert branch.step == len(past)
        for g, part in enumerate(groups.segments()):
            expected = sum(w * s[part] for w, s in zip(factors[g], kept, strict=True))
            assert torch.allclose(branch.values[part], expected, rtol=1e-12, atol=1e-12)


def test_a_half_precision_history_rounds_each_release_once_and_nothing_else():
    stream, groups = releases(12, size=70_001, parts=2, dtype=torch.float32)
    narrow = History(groups.segments(), groups.buffer(), 4, 0.3, Keeping(torch.bfloat16))
    past = []
    for release in stream:
        narrow.append(release)
        past.insert(0, release.values.bfloat16().double())
    for g, part in enumerate(groups.segments()):
        rows = torch.stack([s[part] for s in past[:3]])
        assert np.allclose(narrow.view().gram[g], (rows @ rows.T).numpy(), rtol=1e-4, atol=0.5)
        branch = narrow.mix(np.array([[0.5, 0.3, 0.2]] * 2))
        expected = (torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64) @ rows).float()
        assert torch.allclose(branch.values[part], expected, atol=1e-5)
    assert narrow.state_dict()["ring"].dtype == torch.bfloat16
    assert narrow.state_dict()["ring"].shape == (3, 140_002)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_history_in_host_memory_has_the_same_bits(dtype):
    stream, groups = releases(9, size=270_001, parts=2, dtype=torch.float32)
    here = History(groups.segments(), groups.buffer(), 4, 0.3, Keeping(dtype))
    there = History(groups.segments(), groups.buffer(), 4, 0.3, Keeping(dtype, torch.device("cpu")))
    for release in stream:
        here.append(release)
        there.append(release)
        assert np.array_equal(here.view().gram, there.view().gram)
        assert np.array_equal(here.view().trend, there.view().trend)
    weights = np.array([[0.5, 0.3, 0.2]] * 2)
    assert torch.equal(here.mix(weights).values, there.mix(weights).values)
    ours, theirs = here.state_dict(), there.state_dict()
    assert torch.equal(ours.pop("ring"), theirs.pop("ring"))
    assert torch.equal(ours.pop("trend"), theirs.pop("trend"))
    assert ours == theirs


def test_only_the_ring_grows_with_the_window():
    _, groups = releases(0, size=10_000)

    def numbers(window):
        state = History(groups.segments(), groups.buffer(), window, 0.3).state_dict()
        return {k: v.numel() for k, v in state.items() if isinstance(v, torch.Tensor)}

    small, large = numbers(2), numbers(33)
    assert (small.pop("ring"), large.pop("ring")) == (10_000, 320_000)
    assert small == large == {"trend": 10_000}
    gram = History(groups.segments(), groups.buffer(), 33, 0.3).state_dict()["products"]["gram"]
    assert np.size(gram) == 32 * 32  # and that is all


def test_a_history_of_another_shape_is_refused():
    engine, *rest = private(FO(window=4))
    run(engine, *rest, 3)
    state = engine.state_dict()
    other, *_ = private(FO(window=5))
    with pytest.raises(Exception, match="window"):
        other.load_state_dict(state)
    damaged = copy.deepcopy(state)
    damaged["memory"]["history"]["ring"] = torch.zeros(2, 2)
    same, *_ = private(FO(window=4))
    with pytest.raises(ConfigError, match="'ring': it should be"):
        same.load_state_dict(damaged)
    memory = state["memory"]
    history = memory["history"]
    for broken in (
        None,
        {},
        {"history": {}},
        {**memory, "history": None},
        {**memory, "history": {**history, "ring": history["ring"].tolist()}},
        {**memory, "history": {**history, "ring": history["ring"] * math.nan}},
        {**memory, "history": {**history, "ring": history["ring"].bfloat16()}},
        {**memory, "history": {**history, "count": 2}},
        {**memory, "history": {**history, "count": -1}},
        {**memory, "history": {**history, "kept": 99}},
        {**memory, "history": {**history, "products": history["products"] | {"gram": [[1.0]]}}},
        {**memory, "history": {**history, "products": history["products"] | {"started": 1}}},
        {**memory, "history": {k: v for k, v in history.items() if k != "products"}},
    ):
        with pytest.raises(ConfigError, match="damaged"):
            same.load_state_dict(state | {"memory": broken})
    for change in ({"released": -1}, {"released": "x"}, {"next_lot": None}, {"plan": None}):
        with pytest.raises(ConfigError, match="damaged"):
            same.load_state_dict(state | change)
    with pytest.raises(ConfigError, match="version"):
        same.load_state_dict([])
    assert same.ledger.steps == same.released == 0
    same.load_state_dict(state)
    assert same.released == 3


def test_releases_too_large_for_their_squares_leave_no_nan():
    engine, model, optimizer, loader = private(FO(window=3), max_grad_norm=1e22)
    with pytest.warns(UserWarning, match="exceed their precision"):
        run(engine, model, optimizer, loader, 3)
    assert torch.isfinite(weights(model)).all()
    assert "nan" not in str(engine.diagnostics())


def test_inner_products_keep_their_digits_in_large_models():
    stream, groups = releases(3, size=3_000_001, dtype=torch.float32)
    history = History(groups.segments(), groups.buffer(), 4, 0.3)
    past = []
    for release in stream:
        history.append(release)
        past.insert(0, release.values.double())
    rows = torch.stack(past)
    exact = (rows @ rows.T).numpy()
    assert np.allclose(np.diagonal(history.view().gram[0]), np.diagonal(exact), rtol=1e-5)
