"""Opacus' schedulers: the same values, each charged; what cannot be honoured names its line."""

from __future__ import annotations

import re
import types

import pytest
import torch
from torch.utils.data import DataLoader

from tests.support.loops import epoch, mlp, private, records
from vestige import PrivacyEngine, schedulers
from vestige.errors import ConfigError, PrivacyError

KINDS = {
    "ExponentialNoise": {"gamma": 0.9},
    "StepNoise": {"step_size": 2, "gamma": 0.8},
    "LambdaNoise": {"noise_lambda": lambda call: 1 + 0.25 * call},
    "ExponentialGradClip": {"gamma": 0.9},
    "StepGradClip": {"step_size": 2, "gamma": 0.8},
    "LambdaGradClip": {"scheduler_function": lambda call: 1 / (1 + call)},
}
NOISY = [name for name in KINDS if name.endswith("Noise")]


@pytest.mark.parametrize("name", KINDS)
def test_the_values_are_those_of_opacus(name):
    opacus = pytest.importorskip("opacus.schedulers")
    engine, model, optimizer, loader = private(noise_multiplier=2.0, max_grad_norm=0.5)
    theirs = types.SimpleNamespace(noise_multiplier=2.0, max_grad_norm=0.5)
    reference = getattr(opacus, name)(theirs, **KINDS[name])
    scheduler = getattr(schedulers, name)(optimizer, **KINDS[name])
    for _ in range(5):
        assert optimizer.noise_multiplier == pytest.approx(theirs.noise_multiplier)
        assert optimizer.max_grad_norm == pytest.approx(theirs.max_grad_norm)
        assert scheduler.last_epoch == reference.last_epoch
        epoch(model, optimizer, loader, limit=4)
        assert engine.accountant.history[-1][0] == pytest.approx(theirs.noise_multiplier)
        scheduler.step()
        reference.step()
    assert engine.released == 20


def calibrated():
    model = mlp()
    engine = PrivacyEngine("rdp")
    return engine, engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(records(), batch_size=6),
        target_epsilon=3.0,
        target_delta=1e-5,
        epochs=3,
        max_grad_norm=1.0,
    )


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("ExponentialNoise", "0.9 ** (step // 4)"),
        ("StepNoise", "0.8 ** ((step // 4) // 2)"),
        ("LambdaNoise", "noise_lambda(step // 4)"),
    ],
)
def test_noise_that_was_solved_for_names_the_line_to_write_and_that_line_runs(name, formula):
    _, (_, optimizer, _) = calibrated()
    sigma = optimizer.noise_multiplier
    with pytest.raises(PrivacyError, match="was solved for a target epsilon") as refusal:
        getattr(schedulers, name)(optimizer, **KINDS[name])
    line = re.search(r"make_private\((.*)\)\.$", str(refusal.value))[1]
    assert line == f"noise_multiplier=lambda step: {sigma} * {formula}, steps=12"
    options = eval(f"dict({line})", {"noise_lambda": KINDS["LambdaNoise"]["noise_lambda"]})
    table = private(**options)[0].plan.noise_multiplier
    given = KINDS[name].get("noise_lambda") or (
        lambda call: KINDS[name]["gamma"] ** (call // KINDS[name].get("step_size", 1))
    )
    assert table == pytest.approx([sigma * given(step // 4) for step in range(12)])


def test_clip_bounds_may_move_under_a_target():
    engine, (model, optimizer, loader) = calibrated()
    scheduler = schedulers.ExponentialGradClip(optimizer, gamma=0.5)
    for _ in range(3):
        epoch(model, optimizer, loader)
        scheduler.step()
    assert optimizer.max_grad_norm == 0.125 and engine.get_epsilon(1e-5) <= 3.0


@pytest.mark.parametrize("name", KINDS)
def test_a_place_of_its_own_is_refused(name):
    optimizer = private()[2]
    with pytest.raises(PrivacyError, match=r"last_epoch=3\) is refused.*load_checkpoint"):
        getattr(schedulers, name)(optimizer, last_epoch=3, **KINDS[name])
    scheduler = getattr(schedulers, name)(optimizer, **KINDS[name])
    scheduler.load_state_dict(scheduler.state_dict())
    with pytest.raises(PrivacyError, match=r"load_state_dict\({'last_epoch': 2}\) is refused"):
        scheduler.load_state_dict({"last_epoch": 2})
    with pytest.raises(PrivacyError, match="an optimizer without its engine"):
        getattr(schedulers, name)(torch.optim.SGD(mlp().parameters()), **KINDS[name])


def test_a_checkpoint_brings_the_scheduler_to_its_place(tmp_path):
    for _ in range(2):
        engine, model, optimizer, loader = private()
        scheduler = schedulers.StepNoise(optimizer, step_size=1, gamma=0.5)
        if (tmp_path / "run.pt").exists():
            engine.load_checkpoint(tmp_path / "run.pt", scheduler=scheduler)
        epoch(model, optimizer, loader)
        scheduler.step()
        engine.save_checkpoint(tmp_path / "run.pt", scheduler=scheduler)
    assert scheduler.last_epoch == 2 and optimizer.noise_multiplier == 0.25
    assert [noise for noise, _, _ in engine.accountant.history] == [1.0, 0.5]


def test_the_function_is_asked_before_the_first_lot_and_never_again():
    calls = []
    _, model, optimizer, loader = private(steps=12)
    scheduler = schedulers.LambdaNoise(optimizer, noise_lambda=lambda n: calls.append(n) or 1.0)
    assert calls == list(range(13))
    epoch(model, optimizer, loader)
    scheduler.step()
    assert calls == list(range(13))


def test_a_function_that_ends_early_is_refused_where_it_ends():
    _, model, optimizer, loader = private()
    scheduler = schedulers.LambdaNoise(
        optimizer, noise_lambda=[1.0, 0.5].__getitem__, every="release"
    )
    for _ in range(2):
        epoch(model, optimizer, loader, limit=1)
        if not scheduler.last_epoch:
            scheduler.step()
    with pytest.raises(PrivacyError, match=r"factor for call 2 is nan.*noise_lambda\(step\)"):
        scheduler.step()
    with pytest.raises(ConfigError, match="the scheduler's function raised"):
        schedulers.LambdaNoise(private()[2], noise_lambda=[].__getitem__)
