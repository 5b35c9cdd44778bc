"""DP-SAM and DiSK as methods: their limits, and what they need."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from tests.support.small_runs import STEPS, closure_of, flat, private, run
from tests.support.two_looks import (
    LR,
    RADIUS,
    close,
    lots,
    sgd,
)
from vestige import ConfigError, PrivacyError
from vestige.methods import DPSAM, Disk, DPSAMPerExample

TWICE = [DPSAM(RADIUS), DPSAMPerExample(RADIUS), Disk(ahead=0.5)]


def test_two_noisy_looks_at_one_lot_need_it_in_one_piece():
    with pytest.raises(ConfigError, match=r"twice and needs it in one piece.*size=3"):
        private(DPSAM(RADIUS), max_physical_batch_size=3)


@pytest.mark.parametrize("method", [DPSAM(0.0), DPSAMPerExample(0.0)], ids=str)
def test_a_radius_of_zero_is_dp_sgd(method):
    ours, theirs = private(method, sgd()), private("dp-sgd", sgd())
    run(*ours)
    run(*theirs)
    assert close(flat(ours[1].parameters()), flat(theirs[1].parameters()), 1e-12)


def test_a_radius_of_zero_with_a_fresh_sample_is_dp_sgd_with_every_other_lot_wasted():
    ours, theirs = private(DPSAM(0.0, "fresh"), sgd()), private("dp-sgd", sgd())
    run(*ours)
    engine, model, optimizer, loader = theirs
    for t, (x, y, _) in enumerate(lots(engine, loader, STEPS)):
        optimizer.param_groups[0]["lr"] = LR * (t % 2)
        optimizer.step(closure_of(model, optimizer, x, y))
    assert torch.equal(flat(ours[1].parameters()), flat(model.parameters()))
    assert ours[0].ledger.events == engine.ledger.events


@pytest.mark.parametrize("method", TWICE, ids=str)
def test_without_a_closure_the_step_is_refused_and_nothing_is_lost(method):
    engine, model, optimizer, loader = private(method, sgd())
    home = flat(model.parameters())
    for x, y in loader:
        with pytest.raises(PrivacyError, match=r"evaluates every batch twice: call optimizer.step"):
            optimizer.step()
        assert engine.ledger.steps == engine.released == 0
        optimizer.step(closure_of(model, optimizer, x, y))
        break
    assert engine.released == 1
    assert not torch.equal(flat(model.parameters()), home)


@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("method", TWICE, ids=str)
def test_a_closure_without_a_backward_is_refused(method, when):
    engine, model, optimizer, loader = private(method, sgd())
    run(engine, model, optimizer, loader, 2)
    home, calls = flat(model.parameters()), itertools.count(1)
    for x, y in loader:
        whole = closure_of(model, optimizer, x, y)

        def closure(x=x, y=y, whole=whole):
            return F.cross_entropy(model(x), y) if next(calls) == when else whole()

        with pytest.raises(PrivacyError, match="did not call backward on its loss"):
            optimizer.step(closure)
        break
    assert torch.equal(flat(model.parameters()), home)
    assert engine.released == 2


@pytest.mark.parametrize("method", TWICE, ids=str)
def test_a_backward_before_the_step_is_refused(method):
    _, model, optimizer, loader = private(method, sgd())
    for x, y in loader:
        if not isinstance(method, DPSAMPerExample):
            F.cross_entropy(model(x), y).backward()
            with pytest.raises(PrivacyError, match="leave the backward to the closure"):
                optimizer.step(closure_of(model, optimizer, x, y))
        break
    _, model, optimizer, _ = private(method, sgd())
    with pytest.raises(PrivacyError, match="draw it from the private loader"):
        optimizer.step(closure_of(model, optimizer, x, y))
