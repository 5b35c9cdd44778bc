"""The memory at work: history, recall, diagnostics, saving, schedules, and what it refuses."""

from __future__ import annotations

import copy
import io
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from vestige import ConfigError, PrivacyEngine, PrivacyError, methods
from vestige.gradients.groups import partition
from vestige.memory import spectrum
from vestige.memory.history import History
from vestige.memory.products import NoiseGram
from vestige.memory.recall import Recollection
from vestige.memory.rules import FractionalMemory, SpectralMemory, UniformMemory, View, shuffled
from vestige.methods import FO, METHODS, SMA, Exponential, PostFM, SMAFixed, SMAShuffled, Uniform
from vestige.privacy.accounting import epsilon
from vestige.privacy.ledger import Event, Ledger
from vestige.privacy.noise_scales import NoiseScale
from vestige.release.door import ClippedSum, Door, Position
from vestige.sampling.streams import Randomness

N, LOT = 24, 6
REMEMBERING = ["fo", "sma", "uniform", "exponential", "post-fm", "sma-shuffled", "sma-fixed"]


def net(seed=0):
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Flatten(), nn.Linear(36, 6), nn.Linear(6, 3)
        )


def records(n=N):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 5, 5, generator=generator)
    return TensorDataset(x, torch.randint(0, 3, (n,), generator=generator))


def private(method, model=None, engine=None, optimizer=None, **options):
    """A small private run: (engine, model, optimizer, loader)."""
    model = net() if model is None else model
    engine = engine or PrivacyEngine("rdp", noise_seed=11)
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if "group_noise_multipliers" not in options:
        options.setdefault("noise_multiplier", 1.0)
    made = engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=DataLoader(records(), batch_size=LOT),
        method=method,
        **{"max_grad_norm": 1.0} | options,
    )
    return engine, *made


def step(model, optimizer, x, y):
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()
    optimizer.step()


def run(engine, model, optimizer, loader, steps, after=lambda: None):
    last = engine.released + steps
    while engine.released < last:
        for x, y in loader:
            step(model, optimizer, x, y)
            after()
            if engine.released == last:
                break


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def releases(count, size=50, parts=1, dtype=torch.float64, scale=1.0, seed=3):
    """A door and its releases of random sums, as (generator of releases, groups)."""
    model = nn.Sequential(*(nn.Linear(size, 1, bias=False) for _ in range(parts))).to(dtype)
    groups = partition(model, "per_layer")
    door = Door(groups, NoiseScale.shared(1.0), Randomness(seed), Ledger())
    generator = torch.Generator().manual_seed(seed)
    bounds = (1.0,) * parts

    def stream():
        for _ in range(count):
            total = scale * torch.randn(groups.size, generator=generator, dtype=dtype)
            yield door.release(ClippedSum(total, bounds), 0.5)

    return stream(), groups


# -- the history ----------------------------------------------------------------------------


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
    narrow = History(groups.segments(), groups.buffer(), 4, 0.3, torch.bfloat16)
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


@pytest.mark.parametrize("impostor", ["gradient", "sum", "list", "nothing"])
def test_what_is_no_release_is_a_type_error(impostor):
    stream, groups = releases(1)
    raw = {
        "gradient": torch.randn(50, dtype=torch.float64),
        "sum": ClippedSum(torch.randn(50, dtype=torch.float64), (1.0,)),
        "list": [1.0] * 50,
        "nothing": None,
    }[impostor]
    rule = FO().rule(4)
    memory = Recollection(rule, groups, groups.buffer(), 0.9, Position())
    memory.lot_begins()
    with pytest.raises(TypeError, match="releases only"):
        memory.released(raw, None)
    with pytest.raises(TypeError, match="releases only"):
        History(groups.segments(), groups.buffer(), 3, 0.3).append(raw)
    for each in (rule, SMA().rule(4), UniformMemory(3), Exponential().rule(4)):
        with pytest.raises(TypeError, match="View"):
            each.recall(raw)
    memory.released(next(stream), None)  # and a release is taken


# -- the rules at their edges ---------------------------------------------------------------


def test_strong_tempering_leaves_the_newest_release_and_no_nan():
    """Raw weights of exp(-1e6 j) underflow; normalised in logarithms they are 1, 0, 0, ..."""
    stream, groups = releases(5)
    history = History(groups.segments(), groups.buffer(), 4, 0.3)
    for release in stream:
        history.append(release)
    rule = FO(tempering=1e6, window=4).rule(1)
    found = rule.recall(history.view())
    assert found.weights.tolist() == [[1.0, 0.0, 0.0]]
    assert found.depth.tolist() == [1.0]


def test_silent_releases_give_no_nan():
    """No noise and no gradient: every release is zero, and so are norms, gates and branches."""
    model = nn.Linear(6, 3)
    groups = partition(model, "flat")
    for method in (FO(), SMA(), Uniform(), Exponential()):
        door = Door(groups, NoiseScale.shared(0.0), Randomness(1), Ledger())
        memory = Recollection(method.rule(4), groups, groups.buffer(), 0.9, door.position)
        for _ in range(5):
            memory.lot_begins()
            release = door.release(ClippedSum(groups.buffer(), (1.0,)), 1.0)
            memory.released(release, None)
            flat = [v for v in memory.diagnostics().values() if isinstance(v, list)]
            assert "nan" not in str(flat)
        assert memory.branch is None or not memory.branch.values.any()


@given(st.integers(0, 30), st.integers(0, 10_000))
def test_a_shuffle_is_a_permutation_without_fixed_points(size, seed):
    items = list(range(100, 100 + size))
    mixed = shuffled(items, seed)
    assert sorted(mixed) == items
    assert mixed == shuffled(items, seed)
    assert size < 2 or all(a != b for a, b in zip(items, mixed, strict=True))


# -- in the engine --------------------------------------------------------------------------


@pytest.mark.parametrize("name", REMEMBERING)
@pytest.mark.parametrize("options", [{}, {"history_dtype": torch.bfloat16}])
def test_saving_and_loading_in_the_middle_continues_bit_for_bit(name, options):
    method = methods.resolve(name, {"refresh": 3} if name == "sma" else {})
    whole = private(method, **options)
    told = []
    run(*whole, 17, after=lambda: told.append(whole[0].diagnostics()))

    first = private(method, **options)
    run(*first, 8)
    engine, model, optimizer, _ = first
    buffer = io.BytesIO()
    saved = {"e": engine.state_dict(), "m": model.state_dict(), "o": optimizer.state_dict()}
    torch.save(saved, buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)

    second = private(method, model=net(seed=5), **options)
    engine, model, optimizer, loader = second
    model.load_state_dict(state["m"])
    optimizer.load_state_dict(state["o"])
    engine.load_state_dict(state["e"])
    again = []
    run(engine, model, optimizer, loader, 9, after=lambda: again.append(engine.diagnostics()))
    assert torch.equal(weights(model), weights(whole[1]))
    assert again == told[8:]
    assert engine.get_epsilon(1e-5) == whole[0].get_epsilon(1e-5)


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


def test_exponents_are_checked_when_a_state_is_loaded():
    engine, *rest = private(SMA())
    run(engine, *rest, 3)
    state = engine.state_dict()
    for broken in (None, [1.0], [1.0, 2.0, 3.0, "x"]):
        other, *_ = private(SMA())
        with pytest.raises(ConfigError, match="exponent for each of 4 groups"):
            other.load_state_dict(state | {"memory": state["memory"] | {"exponents": broken}})


def test_a_state_is_refused_where_it_would_overwrite_a_run_and_changes_nothing():
    engine, model, optimizer, loader = private(FO(window=4))
    run(engine, model, optimizer, loader, 2)
    early = copy.deepcopy(engine.state_dict())
    run(engine, model, optimizer, loader, 3)
    with pytest.raises(PrivacyError, match="would forget them"):
        engine.load_state_dict(early)
    run(engine, model, optimizer, loader, 1)
    assert engine.released == engine.parts["memory"]._history.count == 6
    fresh, model, optimizer, loader = private(FO(window=4))
    next(iter(loader))
    with pytest.raises(PrivacyError, match="in the middle of a lot"):
        fresh.load_state_dict(early)


def test_the_branch_exists_before_the_lot_is_drawn(monkeypatch):
    """Every recall for step t comes before lot t is drawn, and none after it until its release."""
    from vestige.sampling import lots as sampling

    order = []
    draw, recall = sampling.draw_lot, SpectralMemory._recall

    def drawing(randomness, number, size, rate):
        order.append(("draw", number))
        return draw(randomness, number, size, rate)

    def recalling(self, view):
        order.append(("recall", view.step))
        return recall(self, view)

    monkeypatch.setattr(sampling, "draw_lot", drawing)
    monkeypatch.setattr(SpectralMemory, "_recall", recalling)
    run(*private(SMA()), 12)
    # Step 0 has no step before it: its (empty) recall happens when the first lot is handed out.
    assert order[:2] == [("draw", 0), ("recall", 0)]
    assert order[2:] == [e for t in range(1, 12) for e in (("recall", t), ("draw", t))] + [
        ("recall", 12)
    ]


CHANGES = {
    "in place": lambda p: torch.no_grad()(lambda: p.copy_(p.sign() * p.abs().sqrt()))(),
    "through data": lambda p: p.data.copy_(p.data.sign() * p.data.abs().sqrt()),
    "new data": lambda p: setattr(p, "data", p.data.sign() * p.data.abs().sqrt()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_weights_changed_between_steps_are_read_again(change):
    engine, model, optimizer, loader = private(SMA(interval=(1.0, 1.1), window=3))
    run(engine, model, optimizer, loader, 5)
    before = engine.parts["memory"].branch.values.clone()
    CHANGES[change](model[3].weight)
    expected = spectrum.exponent(model[3].weight)
    for x, y in loader:
        assert not torch.equal(engine.parts["memory"].branch.values, before)
        # What the loop does to the weights once it has seen the lot does not count any more.
        recalled = engine.parts["memory"].branch.values.clone()
        model[3].weight.data.mul_(x.abs().max())
        engine.backward(F.cross_entropy(model(x), y, reduction="none"))
        assert torch.equal(engine.parts["memory"].branch.values, recalled)
        model[3].weight.data.div_(x.abs().max())
        optimizer.step()
        break
    assert engine.diagnostics()["rho"][2] == expected


def test_a_refresh_period_keeps_the_exponents_in_between():
    engine, model, optimizer, loader = private(SMA(refresh=4))
    told = []
    run(engine, model, optimizer, loader, 14, after=lambda: told.append(engine.diagnostics()))
    rho = [facts["rho"][2] for facts in told]
    assert rho[0] is None
    assert all(rho[t] == rho[t - (t - 1) % 4] for t in range(1, 14))
    assert len(set(rho[1:])) == 4


def test_a_step_that_fails_after_its_release_is_remembered_all_the_same():
    """The release is public and charged, so it belongs to the history; the run goes on."""
    engine, model, optimizer, loader = private(FO(window=3))
    run(engine, model, optimizer, loader, 3)
    batches = iter(loader)
    x, y = next(batches)
    optimizer.zero_grad()
    F.cross_entropy(model(x), y).backward()

    def fails(*_):
        raise RuntimeError("no memory left")

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(RuntimeError, match="no memory left"):
        optimizer.step()
    hook.remove()
    assert engine.released == 4
    x, y = next(batches)
    step(model, optimizer, x, y)
    assert engine.diagnostics()["step"] == 4
    assert engine.ledger.steps == 5


@pytest.mark.parametrize("name", ["fo", "sma", "post-fm"])
@pytest.mark.parametrize("steps_before", [0, 3])
def test_an_interrupt_before_the_release_is_remembered_starts_the_memory_afresh(
    name, steps_before, monkeypatch
):
    engine, model, optimizer, loader = private(methods.resolve(name, {"window": 3}))
    run(engine, model, optimizer, loader, steps_before)

    def interrupted(self, release):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(History, "append", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(engine, model, optimizer, loader, 1)
    assert engine.released == engine.ledger.steps == steps_before + 1
    told = []
    with pytest.warns(UserWarning, match="starts afresh"):
        run(engine, model, optimizer, loader, 4, lambda: told.append(engine.diagnostics()))
    assert [facts["step"] for facts in told] == list(range(steps_before + 1, steps_before + 5))
    assert [sum(w > 0 for w in facts["weights"][0]) for facts in told] == [0, 1, 2, 2]
    assert torch.isfinite(weights(model)).all()
    assert engine.state_dict()["memory"]["history"]["count"] == engine.released


def test_releases_too_large_for_their_squares_leave_no_nan():
    engine, model, optimizer, loader = private(FO(window=3), max_grad_norm=1e22)
    with pytest.warns(UserWarning, match="exceed their precision"):
        run(engine, model, optimizer, loader, 3)
    assert torch.isfinite(weights(model)).all()
    assert "nan" not in str(engine.diagnostics())


def test_an_abandoned_lot_is_not_handed_out_any_further():
    engine, model, optimizer, loader = private(FO(window=3), max_physical_batch_size=2)
    lots = []
    for x, y in loader:
        lots.append(engine._run.position.lot)
        if len(lots) == 1:
            engine.abandon_lot()
            continue
        step(model, optimizer, x, y)
    assert lots[0] == 0 and lots.count(0) == 1
    assert engine.ledger.steps == 4 and engine.released == 3


def test_an_abandoned_lot_leaves_the_memory_as_it_was():
    engine, model, optimizer, loader = private(FO(window=3))
    run(engine, model, optimizer, loader, 3)
    branch = engine.parts["memory"].branch.values.clone()
    for _ in loader:
        engine.abandon_lot()
        break
    assert torch.equal(engine.parts["memory"].branch.values, branch)
    run(engine, model, optimizer, loader, 1)
    assert engine.released == 4 and engine.ledger.steps == 5
    (event,) = engine.ledger.events
    assert event.noise_multiplier == pytest.approx(1 / 0.9)


def test_physical_batches_recall_once_per_lot():
    engine, model, optimizer, loader = private(SMA(window=3), max_physical_batch_size=2)
    run(engine, model, optimizer, loader, 8)
    small = weights(model)
    engine, model, optimizer, loader = private(SMA(window=3))
    run(engine, model, optimizer, loader, 8)
    assert torch.allclose(small, weights(model), atol=1e-5)


def test_an_empty_group_takes_part():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.nothing = nn.Parameter(torch.zeros(0))
            self.inner = net()

        def forward(self, x):
            return self.inner(x)

    engine, *rest = private(SMA(window=3), model=Odd())
    run(engine, *rest, 4)
    assert engine.diagnostics()["memory_ratio"][0] == 0.0


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


# -- diagnostics ----------------------------------------------------------------------------


def test_diagnostics_name_every_group_and_every_quantity():
    engine, *rest = private(SMA(window=4))
    assert engine.diagnostics() == {}
    run(engine, *rest, 6)
    facts = engine.diagnostics()
    assert facts["groups"] == list(engine.plan.group_names) == ["0", "1", "3", "4"]
    assert (facts["step"], facts["beta"]) == (5, 0.95)
    for key in [
        "depth",
        "rho",
        "deviation",
        "tempering",
        "gate",
        "scale",
        "warmup",
        "memory_ratio",
    ]:
        assert len(facts[key]) == 4, key
    assert [len(row) for row in facts["weights"]] == [3] * 4
    assert [sum(row) for row in facts["weights"]] == pytest.approx([1.0] * 4)
    assert facts["rho"][1] is None and None not in (facts["rho"][0], facts["rho"][2])
    engine, *rest = private(FO(window=4), clipping="per_layer")
    run(engine, *rest, 6)
    facts = engine.diagnostics()
    assert facts["groups"] == ["all"]
    assert set(facts) == {
        "groups", "step", "beta", "weights", "depth", "inconsistency", "confidence", "memory_ratio",
    }  # fmt: skip
    assert len(facts["inconsistency"][0]) == 3
    engine, *rest = private("dp-sgd")
    run(engine, *rest, 2)
    assert engine.diagnostics() == {"step": 1}


def test_lags_that_are_not_there_yet_are_filled_in():
    engine, *rest = private(FO(window=4))
    told = []
    run(engine, *rest, 4, after=lambda: told.append(engine.diagnostics()))
    assert [f["weights"][0].count(0.0) for f in told] == [3, 2, 1, 0]
    assert [f["inconsistency"][0].count(None) for f in told] == [3, 2, 1, 0]
    assert told[0]["depth"] == told[0]["memory_ratio"] == [0.0]


def test_the_memory_ratio_is_branch_over_release(monkeypatch):
    seen = []
    original = Door.release

    def release(self, clipped, rate, branch=None, gain=1.0, lot=None):
        memory = None if branch is None else branch.values.clone()
        out = original(self, clipped, rate, branch, gain, lot)
        seen.append((memory, out.values.clone(), self.segments))
        return out

    monkeypatch.setattr(Door, "release", release)
    engine, *rest = private(SMA(window=4, warmup=2.0))
    told = []
    run(engine, *rest, 9, after=lambda: told.append(engine.diagnostics()))
    assert told[0]["memory_ratio"] == [0.0] * 4
    for facts, (memory, out, segments) in zip(told[1:], seen[1:], strict=True):
        ratios = [float(memory[s].norm() / out[s].norm()) for s in segments]
        assert facts["memory_ratio"] == pytest.approx(ratios, rel=1e-5)


# -- accounting and schedules ---------------------------------------------------------------


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp_classic"])
@pytest.mark.parametrize("method", [FO(beta=0.7), SMA(beta=0.6), Uniform(beta=0.8), PostFM(0.5)])
def test_epsilon_is_that_of_sigma_over_beta(method, accountant):
    engine, *rest = private(method, engine=PrivacyEngine(accountant, noise_seed=1))
    run(engine, *rest, 5)
    beta = 1.0 if isinstance(method, PostFM) else method.beta
    expected = epsilon([Event(LOT / N, 1.0 / beta, 5)], 1e-5, accountant)
    assert engine.get_epsilon(1e-5) == pytest.approx(expected, rel=1e-12)


def test_group_noise_is_accounted_by_equation_19_of_the_sma_paper():
    sigmas = [2.0, 1.5, 3.0, 1.0]
    engine, *rest = private(
        SMA(beta=0.8), group_noise_multipliers=sigmas, max_grad_norm=[1.0, 0.5, 2.0, 1.0]
    )
    run(engine, *rest, 3)
    (event,) = engine.ledger.events
    assert event.noise_multiplier == pytest.approx(
        1 / (0.8 * math.sqrt(sum(s**-2 for s in sigmas)))
    )
    assert engine.plan.noise_stds == (2.0, 0.75, 6.0, 1.0)


@pytest.mark.parametrize("name", ["fo", "sma", "dp-sgd", "post-fm"])
def test_calibration_solves_for_the_joint_guarantee(name):
    engine = PrivacyEngine("rdp", noise_seed=1)
    model = net()
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=LOT),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=5,
        max_grad_norm=1.0,
        method=name,
    )
    beta = {"fo": 0.9, "sma": 0.95}.get(name, 1.0)
    assert engine.plan.beta == beta
    reached = epsilon([Event(0.25, engine.plan.noise_multiplier / beta, 20)], 1e-5, "rdp")
    assert 2.99 < reached <= 3.0


def test_public_schedules_are_accounted_step_by_step():
    steps = 7
    engine, *rest = private(
        FO(beta=lambda t: 1 - 0.1 * t),
        noise_multiplier=lambda t: 1.0 + t,
        sample_rate=[0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1],
        steps=steps,
    )
    run(engine, *rest, steps)
    rates = [0.1, 0.2, 0.3, 0.4, 0.3, 0.2, 0.1]
    found = [(e.sample_rate, e.noise_multiplier) for e in engine.ledger.events]
    expected = [(rates[t], (1.0 + t) / (1 - 0.1 * t)) for t in range(steps)]
    assert [f[0] for f in found] == rates
    assert [f[1] for f in found] == pytest.approx([e[1] for e in expected])
    spent = epsilon([Event(q, s) for q, s in expected], 1e-5, "rdp")
    assert engine.get_epsilon(1e-5) == pytest.approx(spent, rel=1e-9)
    plan = engine.plan.as_dict()
    assert plan["beta"] == pytest.approx([1 - 0.1 * t for t in range(steps)])
    assert plan["noise_multiplier"] == [1.0 + t for t in range(steps)]


def test_noise_and_lots_follow_their_schedules(monkeypatch):
    """Silence, then noise; an empty rate of nearly 0, then everybody."""
    from vestige.sampling import lots as sampling

    sizes = []
    draw = sampling.draw_lot

    def counted(*args):
        lot = draw(*args)
        sizes.append(len(lot))
        return lot

    monkeypatch.setattr(sampling, "draw_lot", counted)
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    engine, model, optimizer, loader = private(
        "dp-sgd",
        model,
        optimizer=optimizer,
        noise_multiplier=[0.0, 0.0, 50.0, 0.0],
        sample_rate=[1e-12, 1.0, 1e-12, 1e-12],
    )
    norms = []
    run(
        engine,
        model,
        optimizer,
        loader,
        4,
        lambda: norms.append(float(model[3].weight.grad.norm())),
    )
    assert sizes == [0, N, 0, 0]
    assert norms[0] == norms[3] == 0 and norms[1] > 0 and norms[2] > 20


def test_a_schedule_is_asked_once_for_every_step():
    """One that answers differently the second time could exceed the target it was solved for."""
    asked, drawn = [], []

    def beta(t):
        asked.append(t)
        return 0.5 if len(asked) <= 20 else 1.0

    def rate(t):
        drawn.append(t)
        return 0.2 if len(drawn) <= 20 else 0.4

    model, engine = net(), PrivacyEngine("rdp", noise_seed=1)
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=LOT),
        target_epsilon=2.0,
        target_delta=1e-5,
        steps=20,
        sample_rate=rate,
        max_grad_norm=1.0,
        method=FO(beta=beta),
    )
    told = []
    run(engine, model, optimizer, loader, 20, lambda: told.append(engine.diagnostics()["beta"]))
    assert asked == drawn == list(range(20))
    assert set(told) == {0.5} and engine.plan.beta == 0.5
    assert 1.99 < engine.get_epsilon(1e-5) <= 2.0


def test_post_fm_with_a_window_of_one_moves_by_beta_times_the_release():
    seen = {}
    for window in (1, 2):
        engine, model, optimizer, loader = private(PostFM(0.5, window=window))
        run(engine, model, optimizer, loader, 1)
        seen[window] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(seen[1], seen[2])


def test_settings_of_numpy_and_torch_become_plain_numbers():
    engine, *rest = private(
        SMA(
            beta=np.float32(0.5),
            window=np.int64(3),
            interval=np.array([2, 6]),
            ema=torch.tensor(0.25),
        ),
        group_noise_multipliers=np.array([1.0, 2.0, 3.0, 4.0]),
        sample_rate=np.float64(0.25),
    )
    run(engine, *rest, 2)
    buffer = io.BytesIO()
    torch.save(engine.state_dict(), buffer)
    buffer.seek(0)
    state = torch.load(buffer, weights_only=True)
    assert state["plan"]["settings"]["interval"] == [2.0, 6.0]
    assert json.loads(json.dumps(engine.plan.as_dict())) == engine.plan.as_dict()
    assert FO(beta=np.array([0.9, 0.8])).beta == (0.9, 0.8)


def test_a_constant_schedule_is_the_constant():
    first = private(FO(beta=0.8), noise_multiplier=1.3)
    run(*first, 6)
    second = private(
        FO(beta=lambda _: 0.8), noise_multiplier=lambda _: 1.3, sample_rate=lambda _: 0.25, steps=6
    )
    run(*second, 6)
    assert torch.equal(weights(first[1]), weights(second[1]))
    assert first[0].ledger.events == second[0].ledger.events


def test_calibration_under_a_beta_schedule_reaches_its_target():
    def beta(t):
        return 1.0 if t < 10 else 0.5

    model, engine = net(), PrivacyEngine("rdp", noise_seed=1)
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=LOT),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=5,
        max_grad_norm=1.0,
        method=FO(beta=beta),
    )
    noise = engine.plan.noise_multiplier
    events = [Event(0.25, noise, 10), Event(0.25, noise / 0.5, 10)]
    assert 2.99 < epsilon(events, 1e-5, "rdp") <= 3.0


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        (FO(beta=lambda t: 0.9), {}, "pass steps="),
        (FO(beta=lambda t: 1 - t), {"steps": 3}, r"beta=0 must be in \(0, 1\]"),
        (FO(beta=[0.9, 0.8]), {"steps": 3}, "beta has 2 values for 3 steps"),
        ("fo", {"noise_multiplier": lambda t: 1.0}, "pass steps="),
        ("fo", {"noise_multiplier": [1.0, -1.0]}, "positive finite"),
        ("fo", {"noise_multiplier": []}, "noise_multiplier has 0 values"),
        ("fo", {"sample_rate": lambda t: 2.0, "steps": 2}, "sample_rate=2.0 must be in"),
        ("sma", {"group_noise_multipliers": lambda t: [1.0] * 4}, "pass steps="),
        ("sma", {"group_noise_multipliers": lambda t: [1.0], "steps": 2}, "1 values for 4 groups"),
        ("fo", {"history_dtype": torch.float16}, "history_dtype=torch.float16"),
        ("fo", {"history_dtype": torch.int8}, "history_dtype=torch.int8"),
        ("fo", {"noise_multiplier": torch.tensor([1.0, math.nan])}, "positive finite"),
        ("fo", {"noise_multiplier": 10**400}, "positive finite"),
        ("sma", {"group_noise_multipliers": 1.0}, "must be a sequence with one number"),
        ("sma", {"group_noise_multipliers": dict.fromkeys(range(4), 1.0)}, "must be a sequence"),
        ("sma", {"group_noise_multipliers": (s for s in "abcd")}, "must be a sequence"),
    ],
)
def test_bad_schedules_are_refused(method, options, message):
    with pytest.raises(ConfigError, match=message):
        private(method, **options)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: FO(beta=0), r"beta=0 must be in \(0, 1\]"),
        (lambda: FO(beta=1.01), "beta=1.01"),
        (lambda: FO(beta="much"), "beta='much'"),
        (lambda: FO(beta=True), "beta=True"),
        (lambda: FO(beta=math.nan), "beta=nan"),
        (lambda: FO(beta=(0.9, 2)), "beta=2"),
        (lambda: FO(beta=[]), "beta is empty"),
        (lambda: FO(beta=np.array([0.9, 1.1])), "beta=1.1"),
        (lambda: FO(beta=10**400), "beta=1000"),
        (lambda: FO(beta=np.True_), "beta=True"),
        (lambda: FO(window=1025), "window=1025 is too long"),
        (lambda: FO(alpha=Fraction(1, 2)), "alpha="),
        (lambda: FO(alpha=0), "alpha=0"),
        (lambda: FO(alpha=1.5), "alpha=1.5"),
        (lambda: FO(window=0), "window=0 must be a whole number of at least 1"),
        (lambda: FO(window=2.5), "window=2.5"),
        (lambda: FO(tempering=-1), "tempering=-1 must be a finite number of at least 0"),
        (lambda: FO(inconsistency=math.inf), "inconsistency=inf"),
        (lambda: FO(ema=0), "ema=0"),
        (lambda: FO(min_scale=0), "min_scale=0 must be a finite number above 0"),
        (lambda: FO(confidence=-1), "confidence=-1"),
        (lambda: FO(eps=0), "eps=0"),
        (lambda: SMA(interval=(6, 2)), r"interval=\(6, 2\) must be two numbers"),
        (lambda: SMA(interval=3), "interval=3"),
        (lambda: SMA(interval=(1, 2, 3)), "interval="),
        (lambda: SMA(warmup=0), "warmup=0"),
        (lambda: SMA(norm_cap=0), "norm_cap=0"),
        (lambda: SMA(tempering=0), "tempering=0"),
        (lambda: SMA(estimator="guess"), "estimator 'guess' is unknown: choose one of hill"),
        (lambda: SMA(refresh=0), "refresh=0"),
        (lambda: SMAShuffled(shuffle_seed=-1), "shuffle_seed=-1"),
        (lambda: SMAFixed(fixed=-0.1), "fixed=-0.1"),
        (lambda: Exponential(decay=1), "decay=1 must be strictly between 0 and 1"),
        (lambda: Uniform(beta=2), "beta=2"),
    ],
)
def test_bad_settings_are_refused_with_value_and_rule(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_the_signatures_are_the_documented_ones():
    assert FO(0.9, 0.8, 8, 0.0, 0.1, 0.3, 1e-6, 1.0, 1e-12) == FO()
    assert SMA(0.95, 0.7, 4, (2.0, 6.0), 1.0, 0.3, None, 1.0, 1e-12, "hill", 1) == SMA()
    assert Uniform(0.9, 8) == Uniform()
    assert Exponential(0.9, 8, 0.7) == Exponential()
    assert set(REMEMBERING) < set(METHODS)


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(REMEMBERING), st.integers(1, 6), st.floats(0.05, 1.0))
def test_any_window_and_beta_run(name, window, beta):
    engine, *rest = private(methods.resolve(name, {"window": window, "beta": beta}))
    run(engine, *rest, 4)
    assert torch.isfinite(weights(rest[0])).all()


def test_every_method_names_its_paper_and_its_guarantee():
    for name, method in METHODS.items():
        assert method.name == name
        assert "arXiv" in method.paper
        assert method.guarantee.startswith(
            "proven" if method.private else "not private as published"
        )
        assert method.__doc__ and method.summary and len(method.summary) < 70


def test_fractional_memory_takes_the_whole_release_whatever_the_clipping():
    """Scores per layer would differ between layers; FO has one of each."""
    assert FractionalMemory.groupwise is False
    engine, *rest = private(FO(window=3), clipping="per_layer")
    run(engine, *rest, 4)
    assert engine.diagnostics()["groups"] == ["all"]
    assert len(engine.plan.group_names) == 4
