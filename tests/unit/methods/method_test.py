"""Methods with a memory: accounting, schedules, settings, and what is refused."""

from __future__ import annotations

import io
import json
import math
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from tests.support.memory_runs import LOT, N, net, private, records, run, weights
from vestige import ConfigError, PrivacyEngine, methods
from vestige.methods import FO, METHODS, SMA, Exponential, PostFM, SMAFixed, SMAShuffled, Uniform
from vestige.privacy.accounting import epsilon
from vestige.privacy.ledger import Event

REMEMBERING = ["fo", "sma", "uniform", "exponential", "post-fm", "sma-shuffled", "sma-fixed"]


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("DP-SGD", "dp-sgd"),
        ("FO-DP-SGD", "fo"),
        ("sma_dp_sgd", "sma"),
        ("dpsgd", "dp-sgd"),
        ("dp_adam", "dp-adam"),
        ("Kalman", "kalman"),
    ],
)
def test_a_name_that_is_nearly_right_is_told_the_right_one(written, meant):
    with pytest.raises(ConfigError, match=f"is unknown: did you mean {meant}\\? `vestige methods`"):
        methods.resolve(written)


def test_a_name_like_no_other_is_told_all():
    for name in ("moon", 3):
        with pytest.raises(ConfigError, match="is unknown: choose from dp-sgd, fo, sma"):
            methods.resolve(name)


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
        (lambda: FO(window=1025), "window=1025 must be at most 1024"),
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
