"""Learning-rate schedulers of a private optimizer advance per release, others as ever."""

from __future__ import annotations

import copy
import pickle
import weakref

import pytest
import torch

from tests.support.garbage import gone
from tests.support.loops import epoch, mlp, private, step
from vestige.engine.schedulers import free_schedulers, gate_schedulers

lr = torch.optim.lr_scheduler
SCHEDULERS = {
    "StepLR": lambda o: lr.StepLR(o, 2, 0.5),
    "LambdaLR": lambda o: lr.LambdaLR(o, lambda t: 1 / (1 + t)),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 10),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, total_steps=30),
    "SequentialLR": lambda o: lr.SequentialLR(
        o, [lr.ConstantLR(o, 0.1), lr.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr.ChainedScheduler(
        [lr.ConstantLR(o, 0.1, 3), lr.ExponentialLR(o, 0.9)]
    ),
}


@pytest.mark.parametrize("early", [True, False])
@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_advance_per_release(name, early):
    """With physical batches of 2 the rates are those of a loop without them."""
    rates = {}
    for physical in (None, 2):
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = SCHEDULERS[name](optimizer) if early else None
        engine, model, optimizer, loader = private(
            model, optimizer=optimizer, max_physical_batch_size=physical
        )
        scheduler = scheduler or SCHEDULERS[name](optimizer)
        seen = []
        for _ in range(2):
            for x, y in loader:
                before = engine.released
                step(model, optimizer, x, y)
                scheduler.step()
                if engine.released > before:
                    seen.append(optimizer.param_groups[0]["lr"])
        rates[physical] = seen
        assert len(seen) == 2 * engine.plan.lots_per_epoch
    assert rates[None] == rates[2]
    assert len(set(rates[None])) > 1


def test_a_scheduler_that_steps_once_an_epoch_does():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    _, model, optimizer, loader = private(model, optimizer=optimizer, max_physical_batch_size=2)
    scheduler = lr.StepLR(optimizer, 1, 0.5)
    for n in range(1, 4):
        epoch(model, optimizer, loader)
        scheduler.step()
        assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**n)


def test_a_scheduler_is_saved_copied_and_loaded_as_the_users_class():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr.StepLR(optimizer, 1, 0.5)
    plain_state = set(scheduler.state_dict())
    engine, model, optimizer, loader = private(
        model, optimizer=optimizer, max_physical_batch_size=2
    )
    epoch(model, optimizer, loader, lambda: scheduler.step())
    assert isinstance(scheduler, lr.StepLR)
    assert set(scheduler.state_dict()) == plain_state
    for twin in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert type(twin) is lr.StepLR
        assert twin.last_epoch == scheduler.last_epoch == engine.plan.lots_per_epoch


class Held:
    """An optimizer's run, as far as schedulers ask it."""

    def __init__(self, moved):
        self.moved = moved

    def has_moved(self):
        return self.moved


def sgd():
    return torch.optim.SGD(mlp().parameters(), lr=0.1)


def rate(optimizer):
    return optimizer.param_groups[0]["lr"]


def test_only_the_schedulers_of_that_optimizer_wait():
    mine, other, run = sgd(), sgd(), Held(False)
    schedulers = [lr.StepLR(optimizer, 1, 0.5) for optimizer in (mine, other)]
    gate_schedulers(mine, run.has_moved)
    for optimizer, scheduler in zip((mine, other), schedulers, strict=True):
        optimizer.step()
        scheduler.step()
    assert (rate(mine), rate(other)) == (0.1, 0.05)
    run.moved = True
    schedulers[0].step()
    assert rate(mine) == 0.05


def test_a_scheduler_made_while_others_wait_begins_as_ever():
    optimizer, run = sgd(), Held(False)
    gate_schedulers(optimizer, run.has_moved)
    scheduler = lr.LambdaLR(optimizer, lambda t: 1 / (2 + t))
    assert scheduler.last_epoch == 0
    assert rate(optimizer) == pytest.approx(0.05)


def test_a_class_with_a_step_of_its_own_that_is_defined_later_waits_too():
    optimizer, run = sgd(), Held(False)
    gate_schedulers(optimizer, run.has_moved)

    class Own(lr.LRScheduler):
        def step(self, epoch=None):
            self.last_epoch += 1
            self._step_count += 1
            self.optimizer.param_groups[0]["lr"] *= 0.5

    scheduler = Own(optimizer)
    gate_schedulers(optimizer, run.has_moved)
    before = rate(optimizer)
    scheduler.step()
    assert rate(optimizer) == before
    run.moved = True
    scheduler.step()
    assert rate(optimizer) == before / 2


def test_one_that_waits_for_a_plateau_waits():
    optimizer, run = sgd(), Held(False)
    scheduler = lr.ReduceLROnPlateau(optimizer, patience=0)
    gate_schedulers(optimizer, run.has_moved)
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert rate(optimizer) == 0.1
    run.moved = True
    for loss in (1.0, 2.0, 3.0):
        scheduler.step(loss)
    assert rate(optimizer) < 0.1


def test_a_freed_optimizer_and_a_run_that_is_gone_hold_nothing_back():
    for free in (True, False):
        optimizer, run = sgd(), Held(False)
        scheduler = lr.StepLR(optimizer, 1, 0.5)
        gate_schedulers(optimizer, run.has_moved)
        optimizer.step()
        if free:
            free_schedulers(optimizer)
        else:
            del run
        scheduler.step()
        assert rate(optimizer) == 0.05


def test_neither_the_optimizer_nor_its_run_is_kept_alive():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine, model, optimizer, loader = private(model, optimizer=optimizer)
    epoch(model, optimizer, loader)
    reference = weakref.ref(optimizer)
    engine.detach()
    del engine, model, optimizer, loader
    assert gone(reference)


def test_one_that_counts_no_steps_waits_too():
    """Its own `step` does not count, and must not look as if it were being made for ever."""
    optimizer, run = sgd(), Held(False)
    scheduler = lr.CosineAnnealingWarmRestarts(optimizer, 5)
    gate_schedulers(optimizer, run.has_moved)
    scheduler.step()
    assert rate(optimizer) == 0.1
    run.moved = True
    scheduler.step()
    assert rate(optimizer) < 0.1


def test_what_has_no_optimizer_of_torchs_is_left_alone():
    optimizer, run = sgd(), Held(False)
    gate_schedulers(optimizer, run.has_moved)

    class Odd(lr.StepLR):
        def step(self, epoch=None):
            self.stepped = True

    gate_schedulers(optimizer, run.has_moved)
    odd = Odd.__new__(Odd)
    odd.optimizer = object()
    odd.step()
    assert odd.stepped
