"""Ascents: gradients at weights that were moved, and the weights back home."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.small_runs import STEPS, flat, private, run
from vestige.methods import DPSAT, Disk, DPSATMomentum


def test_disk_looks_ahead_and_averages(seen):
    lr, gain = 0.3, 0.6
    engine, model, optimizer, loader = private(Disk(gain=gain), lambda p: torch.optim.SGD(p, lr=lr))
    home, last, mean, t = flat(model.parameters()), None, None, 0
    while engine.released < STEPS:
        for x, y in loader:
            expected = home if last is None else home + (1 - gain) / gain * (home - last)
            assert (flat(model.parameters()) - expected).abs().max() < 1e-12
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            mean = seen[t] if mean is None else (1 - gain) * mean + gain * seen[t]
            last, home, t = home, home - lr * mean, t + 1
            assert (flat(model.parameters()) - home).abs().max() < 1e-12
            if t == STEPS:
                break


def test_disk_with_a_gain_of_one_is_dp_sgd_bit_for_bit():
    ours = private(Disk(gain=1), lambda p: torch.optim.SGD(p, lr=0.1))
    theirs = private("dp-sgd", lambda p: torch.optim.SGD(p, lr=0.1))
    run(*ours)
    run(*theirs)
    assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))


@pytest.mark.parametrize("method", [DPSAT(radius=0.5), DPSATMomentum(radius=0.5)])
def test_dp_sat_takes_gradients_uphill_and_steps_from_where_it_was(method, seen):
    """Forward passes see theta + e; the update starts at theta; between steps theta is shown."""
    lr = 0.3
    _, model, optimizer, loader = private(method, lambda p: torch.optim.SGD(p, lr=lr))
    home, t, last = flat(model.parameters()), 0, None
    while t < STEPS:
        for x, y in loader:
            at = flat(model.parameters())
            if t == 0:
                assert torch.equal(at, home)
            else:
                direction = (last - home) if isinstance(method, DPSATMomentum) else seen[t - 1]
                expected = home + 0.5 * direction / direction.norm()
                assert (at - expected).abs().max() < 1e-12
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            last, home = home, home - lr * seen[t]
            assert (flat(model.parameters()) - home).abs().max() < 1e-12
            t += 1
            if t == STEPS:
                break


def test_a_radius_of_zero_is_dp_sgd_bit_for_bit():
    for method in (DPSAT(radius=0), DPSATMomentum(radius=0)):
        ours = private(method, lambda p: torch.optim.SGD(p, lr=0.1))
        theirs = private("dp-sgd", lambda p: torch.optim.SGD(p, lr=0.1))
        run(*ours)
        run(*theirs)
        assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))


def test_an_abandoned_lot_and_detaching_bring_the_weights_home():
    engine, model, optimizer, loader = private(DPSAT(radius=1.0))
    run(engine, model, optimizer, loader, 2)
    home = flat(model.parameters())
    for _ in loader:
        assert not torch.equal(flat(model.parameters()), home)
        engine.abandon_lot()
        assert torch.equal(flat(model.parameters()), home)
        break
    for _ in loader:
        engine.detach()
        assert torch.equal(flat(model.parameters()), home)
        break


@pytest.mark.parametrize("method", [Disk(), DPSATMomentum(radius=1.0)])
def test_a_step_that_fails_leaves_no_direction(method):
    engine, model, optimizer, loader = private(method, lambda p: torch.optim.SGD(p, lr=0.1))
    run(engine, model, optimizer, loader, 3)

    def fails(*_):
        raise KeyboardInterrupt

    hook = optimizer.register_step_pre_hook(fails)
    with pytest.raises(KeyboardInterrupt):
        run(engine, model, optimizer, loader, 1)
    hook.remove()
    home = flat(model.parameters())
    for _ in loader:
        assert torch.equal(flat(model.parameters()), home)
        engine.abandon_lot()
        break


def test_weights_loaded_in_the_middle_of_a_lot_are_not_overwritten():
    engine, model, optimizer, loader = private(DPSAT(radius=1.0))
    run(engine, model, optimizer, loader, 2)
    for _ in loader:
        model.load_state_dict({k: torch.full_like(v, 7.0) for k, v in model.state_dict().items()})
        with pytest.warns(UserWarning, match="left as written"):
            engine.abandon_lot()
        break
    assert (flat(model.parameters()) == 7).all()


def test_physical_batches_climb_once_per_lot():
    small = private(DPSAT(radius=0.5), max_physical_batch_size=2)
    run(*small, 8)
    whole = private(DPSAT(radius=0.5))
    run(*whole, 8)
    assert torch.allclose(flat(small[1].parameters()), flat(whole[1].parameters()), atol=1e-9)
