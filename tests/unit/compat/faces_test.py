"""What Opacus' wrappers show, on the user's own objects."""

from __future__ import annotations

import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from tests.support.garbage import gone
from tests.support.loops import mlp, private, step
from vestige.errors import PrivacyError
from vestige.optimizers import DPOptimizer


def test_an_optimizer_shows_the_plan():
    _, model, optimizer, _ = private(noise_multiplier=[1.0, 2.0, 3.0, 4.0], steps=4)
    assert isinstance(optimizer, DPOptimizer) and isinstance(optimizer, torch.optim.SGD)
    assert (optimizer.noise_multiplier, optimizer.max_grad_norm) == (1.0, 1.0)
    assert (optimizer.expected_batch_size, optimizer.accumulated_iterations) == (6, 1)
    assert optimizer.original_optimizer is optimizer
    assert repr(type(optimizer)) == repr(torch.optim.SGD)
    assert model._module is model


def test_the_noise_of_a_schedule_is_that_of_the_coming_release():
    _, model, optimizer, loader = private(noise_multiplier=[1.0, 2.0, 3.0, 4.0], steps=4)
    seen = []
    for x, y in loader:
        seen.append(optimizer.noise_multiplier)
        step(model, optimizer, x, y)
    assert seen == [1.0, 2.0, 3.0, 4.0]


def test_several_groups_have_a_list_of_bounds():
    engine, _, optimizer, _ = private(clipping="per_layer")
    assert optimizer.max_grad_norm == list(engine.plan.bounds)


@pytest.mark.parametrize("name", ["noise_multiplier", "max_grad_norm", "expected_batch_size"])
def test_setting_a_number_of_the_plan_is_refused_with_what_to_do(name):
    engine, _, optimizer, _ = private()
    plan = engine.plan
    with pytest.raises(PrivacyError, match=f"setting optimizer.{name} is refused: .*fixed before"):
        setattr(optimizer, name, 0.1)
    assert engine.plan == plan and getattr(optimizer, name) in (1.0, 6)


@pytest.mark.parametrize("name", ["grad_samples", "clip_and_accumulate", "add_noise"])
def test_what_happens_inside_the_engine_is_refused(name):
    optimizer = private()[2]
    assert not hasattr(optimizer, name)
    with pytest.raises(PrivacyError, match=f"optimizer.{name} is refused: per-example gradients"):
        getattr(optimizer, name)


def test_a_step_hook_is_called_once_for_every_release():
    engine, model, optimizer, loader = private(max_physical_batch_size=2)
    calls = []
    optimizer.attach_step_hook(lambda given: calls.append((given is optimizer, engine.released)))
    for x, y in loader:
        step(model, optimizer, x, y)
    assert calls == [(True, 1), (True, 2), (True, 3), (True, 4)]


def test_copies_and_pickles_are_plain_and_the_original_stays_private():
    _, model, optimizer, loader = private(max_grad_norm=2.0)
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    loaded = torch.load(stream, weights_only=False)
    for plain in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), loaded):
        assert type(plain) is nn.Sequential and not hasattr(plain, "_module")
        assert torch.equal(plain[0].weight, model[0].weight)
    assert b"vestige.compat" not in pickle.dumps(model)
    assert type(copy.deepcopy(optimizer)) is torch.optim.SGD
    assert (model._module is model, optimizer.max_grad_norm) == (True, 2.0)
    for x, y in loader:
        step(model, optimizer, x, y)


class Wrapper(nn.Module):
    """A user's own module that has a name of Opacus' already."""

    def __init__(self):
        super().__init__()
        self._module = mlp()

    def forward(self, x):
        return self._module(x)

    def cleanup(self):
        return "own"


def test_what_a_model_has_already_stays():
    _, model, optimizer, loader = private(Wrapper())
    assert isinstance(model._module, nn.Sequential) and model.cleanup() == "own"
    for x, y in loader:
        step(model, optimizer, x, y)
    assert model.to_standard_module() is model and type(model) is Wrapper


@pytest.mark.parametrize("leave", ["to_standard_module", "remove_hooks", "cleanup"])
def test_leaving_gives_the_plain_module_and_an_engine_that_is_done(leave):
    engine, model, _, loader = private()
    getattr(model, leave)()
    assert type(model) is nn.Sequential
    with pytest.raises(PrivacyError, match="the engine was detached"):
        next(iter(loader))
    assert engine.ledger.steps == 0


def test_detach_undresses():
    engine, model, optimizer, _ = private()
    engine.detach()
    assert (type(model), type(optimizer)) == (nn.Sequential, torch.optim.SGD)


def test_no_private_optimizer_is_made_by_hand():
    with pytest.raises(PrivacyError, match=r"DPOptimizer is refused: .* Pass a torch\.optim"):
        DPOptimizer(optimizer=None, noise_multiplier=1.0, max_grad_norm=1.0)


def test_nothing_of_a_run_is_kept_alive():
    def once():
        engine, model, optimizer, _ = private()
        return [weakref.ref(thing) for thing in (engine, model, optimizer)]

    assert gone(*once())
