"""Steps that look twice: DP-SAM (same sample, fresh sample, per example) and DiSK from two points.

Every sum that goes into the door is taken again by a loop over single examples at weights that are
moved by hand, every noise is drawn again from its stream, and the weights follow a reference of a
few lines: 20 steps in float64, to 1e-9.
"""

from __future__ import annotations

import io
import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import vector_to_parameters

from tests.support.small_runs import LOT, SIGMA, STEPS, N, closure_of, flat, net, private, run
from tests.support.two_looks import (
    LR,
    RADIUS,
    SEGMENTS,
    C,
    clipped_sum,
    close,
    gradients,
    lots,
    normals,
    sgd,
    watch,
)
from vestige import PrivacyError
from vestige.methods import DPSAM, Disk, DPSAMPerExample
from vestige.sampling.streams import FIRST_LOOK


@pytest.fixture
def seen(monkeypatch):
    return watch(monkeypatch)


TWICE = [DPSAM(RADIUS), DPSAMPerExample(RADIUS), Disk(ahead=0.5)]


class Descent:
    """SGD with momentum, by hand."""

    def __init__(self, theta, momentum=0.0):
        self.theta, self.momentum, self.last = theta, momentum, 0.0

    def step(self, gradient):
        self.last = self.momentum * self.last + gradient
        self.theta = self.theta - LR * self.last


def bounds_of(clipping):
    return [C / math.sqrt(len(SEGMENTS[clipping]))] * len(SEGMENTS[clipping])


# -- DP-SAM on one sample -------------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_same_sample_is_its_equations(clipping, momentum, seen):
    """y1 at theta, e = radius y1 / |y1|, y2 at theta + e, and the step from theta with y2 alone."""
    engine, model, optimizer, loader = private(
        DPSAM(RADIUS), sgd(momentum=momentum), clipping=clipping, max_grad_norm=C
    )
    ours = Descent(flat(model.parameters()), momentum)
    at, bounds, long = SEGMENTS[clipping], bounds_of(clipping), []
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        loss = optimizer.step(closure_of(model, optimizer, x, y))
        here = gradients(ours.theta, *rows)
        (first, look), second, release = seen.looks[t], seen.sums[t], seen.values[t]
        assert close(first, clipped_sum(here, bounds, at))
        assert close(look, first + SIGMA * C * normals(t, FIRST_LOOK))
        ahead = gradients(ours.theta + RADIUS * look / look.norm(), *rows)
        assert close(second, clipped_sum(ahead, bounds, at))
        assert close(release, second + SIGMA * C * normals(t))
        if len(rows[0]):  # the loss is that of the weights themselves, not that of the hill
            expected = F.cross_entropy(net_at(ours.theta)(rows[0]), rows[1])
            assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-9)
        ours.step(release / LOT)
        assert close(flat(model.parameters()), ours.theta)
        long.append(len(ahead) > 0 and float(ahead[:, at[0]].norm(dim=1).max()) > bounds[0])
        assert not close(first, second, 1e-3) or not len(rows[0])
    assert any(long)
    assert len(seen.looks) == len(seen.sums) == STEPS
    (event,) = engine.ledger.events
    assert (event.count, event.sample_rate) == (STEPS, LOT / N)
    assert event.noise_multiplier == pytest.approx(SIGMA / math.sqrt(2))


def net_at(theta):
    model = net()
    vector_to_parameters(theta.clone(), model.parameters())
    return model


def test_the_two_looks_at_a_lot_have_noise_of_their_own(seen):
    """With empty lots both looks are noise alone: 75 pairs, correlation within 6 / sqrt(75)."""
    engine, *rest = private(DPSAM(RADIUS), sgd(), sample_rate=1e-12)
    run(engine, *rest, 4)
    for (_, look), release in zip(seen.looks, seen.values, strict=True):
        assert abs(float(torch.corrcoef(torch.stack([look, release]))[0, 1])) < 6 / math.sqrt(75)


# -- DP-SAM on a fresh sample ---------------------------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("closure", [True, False])
def test_fresh_sample_moves_on_every_other_lot(closure, momentum, seen):
    """Even lots give a direction and move nothing, odd ones are taken uphill of the weights.

    The optimizer's momentum and the averages know of the odd lots alone.
    """
    engine, model, optimizer, loader = private(
        DPSAM(RADIUS, "fresh"), sgd(momentum=momentum), max_grad_norm=C, averaging="ema"
    )
    ours = Descent(flat(model.parameters()), momentum)
    mean, e = None, torch.zeros_like(ours.theta)
    for t, (x, y, rows) in enumerate(lots(engine, loader, 2 * STEPS)):
        assert close(flat(model.parameters()), ours.theta + e, 1e-12)
        if closure:
            optimizer.step(closure_of(model, optimizer, x, y))
        else:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
        assert close(seen.sums[t], clipped_sum(gradients(ours.theta + e, *rows), [C], [slice(75)]))
        assert close(seen.values[t], seen.sums[t] + SIGMA * C * normals(t))
        if t % 2:
            ours.step(seen.values[t] / LOT)
            mean = ours.theta if mean is None else 0.99 * mean + 0.01 * ours.theta
            e = torch.zeros_like(e)
        else:
            e = RADIUS * seen.values[t] / seen.values[t].norm()
        assert close(flat(model.parameters()), ours.theta)
    assert not seen.looks
    assert close(flat(engine.averaged_state_dict().values()), mean)
    (event,) = engine.ledger.events
    assert (event.count, event.noise_multiplier) == (2 * STEPS, SIGMA)
    assert engine.released == 2 * STEPS


def test_a_lot_that_gives_a_direction_leaves_the_weights_bit_for_bit():
    engine, model, optimizer, loader = private(DPSAM(RADIUS, "fresh"), sgd(momentum=0.9))
    for t, (x, y, _) in enumerate(lots(engine, loader, 8)):
        if t % 2 == 0:
            before = flat(model.parameters())
            state = [dict(s) for s in optimizer.state.values()]
        optimizer.step(closure_of(model, optimizer, x, y))
        if t % 2 == 0:
            assert torch.equal(flat(model.parameters()), before)
            assert all(p.grad is None for p in model.parameters())
            for old, new in zip(state, optimizer.state.values(), strict=True):
                assert all(torch.equal(old[key], new[key]) for key in new)


def test_schedulers_count_updates_only():
    engine, model, optimizer, loader = private(DPSAM(RADIUS, "fresh"), sgd(lr=1.0))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for x, y, _ in lots(engine, loader, 8):
        optimizer.step(closure_of(model, optimizer, x, y))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.5**4


def test_a_direction_that_waits_for_its_lot_is_saved():
    """Saved after an odd number of lots: the next one is still taken uphill."""
    method = DPSAM(RADIUS, "fresh")
    whole = private(method, sgd())
    run(*whole, 9)
    engine, model, optimizer, loader = private(method, sgd())
    run(engine, model, optimizer, loader, 5)
    buffer = io.BytesIO()
    torch.save([engine.state_dict(), model.state_dict()], buffer)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    engine, model, optimizer, loader = private(method, sgd())
    engine.load_state_dict(saved[0])
    model.load_state_dict(saved[1])
    run(engine, model, optimizer, loader, 4)
    assert torch.equal(flat(model.parameters()), flat(whole[1].parameters()))


def test_an_abandoned_lot_uphill_leaves_its_direction_to_the_next(seen):
    engine, model, optimizer, loader = private(DPSAM(RADIUS, "fresh"), sgd(), max_grad_norm=C)
    home = flat(model.parameters())
    for k, (x, y, rows) in enumerate(lots(engine, loader, 3)):
        if k == 1:
            assert not torch.equal(flat(model.parameters()), home)
            engine.abandon_lot()
            assert torch.equal(flat(model.parameters()), home)
            continue
        optimizer.step(closure_of(model, optimizer, x, y))
        at = home if k == 0 else home + RADIUS * seen.values[0] / seen.values[0].norm()
        assert close(seen.sums[-1], clipped_sum(gradients(at, *rows), [C], [slice(75)]))
    assert close(flat(model.parameters()), home - LR * seen.values[1] / LOT)
    assert engine.ledger.steps == 3


# -- per-example SAM and DiSK from two points -----------------------------------------------


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_per_example_sam_is_a_loop_over_copies_of_the_weights(clipping, momentum, seen):
    """u_i = g_i(theta + radius g_i / |g_i|), the move normalised over all groups together."""
    engine, model, optimizer, loader = private(
        DPSAMPerExample(RADIUS), sgd(momentum=momentum), clipping=clipping, max_grad_norm=C
    )
    ours = Descent(flat(model.parameters()), momentum)
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        moved = [torch.zeros(0, 75, dtype=torch.float64)]
        for i, g in enumerate(gradients(ours.theta, *rows)):
            one = rows[0][i : i + 1], rows[1][i : i + 1]
            moved.append(gradients(ours.theta + RADIUS * g / g.norm(), *one))
        expected = clipped_sum(torch.cat(moved), bounds_of(clipping), SEGMENTS[clipping])
        assert close(seen.sums[t], expected)
        assert close(seen.values[t], expected + SIGMA * C * normals(t))
        ours.step(seen.values[t] / LOT)
        assert close(flat(model.parameters()), ours.theta)
    (event,) = engine.ledger.events
    assert (event.count, event.noise_multiplier) == (STEPS, SIGMA)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize(("gain", "ahead"), [(0.7, 0.5), (0.5, 0.7), (0.9, 0.05), (1.0, 0.5)])
def test_disk_from_two_points_clips_the_combination(gain, ahead, clipping, momentum, seen):
    """u_i = c g_i(theta + ahead d) + (1 - c) g_i(theta), d the last step, clipped as one vector."""
    weight = (1 - gain) / (gain * ahead)  # 0.86, 1.43, 2.2, 0
    engine, model, optimizer, loader = private(
        Disk(gain, ahead), sgd(momentum=momentum), clipping=clipping, max_grad_norm=C
    )
    ours, before, mean = Descent(flat(model.parameters()), momentum), None, None
    at, bounds, apart = SEGMENTS[clipping], bounds_of(clipping), 0.0
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        d = 0.0 if before is None else ours.theta - before
        here, there = (gradients(ours.theta + s * d, *rows) for s in (0.0, ahead))
        expected = clipped_sum(weight * there + (1 - weight) * here, bounds, at)
        each = [clipped_sum(g, bounds, at) for g in (there, here)]
        apart = max(apart, float((weight * each[0] + (1 - weight) * each[1] - expected).norm()))
        assert close(seen.sums[t], expected)
        assert close(seen.values[t], expected + SIGMA * C * normals(t))
        y_t = seen.values[t] / LOT
        mean = y_t if mean is None else (1 - gain) * mean + gain * y_t
        before = ours.theta
        ours.step(mean)
        assert close(flat(model.parameters()), ours.theta)
    assert apart > 1e-4 or weight == 0  # clipping the two on their own would have been noticed


@pytest.mark.parametrize("method", [DPSAMPerExample(RADIUS), Disk(ahead=0.5), Disk(0.5, 0.7)])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_physical_batches_give_the_sum_of_the_whole_lot(method, clipping):
    whole = private(method, sgd(momentum=0.9), clipping=clipping, max_grad_norm=C)
    pieces = private(
        method, sgd(momentum=0.9), clipping=clipping, max_grad_norm=C, max_physical_batch_size=2
    )
    run(*whole)
    run(*pieces)
    assert close(flat(whole[1].parameters()), flat(pieces[1].parameters()))
    assert whole[0].ledger.events == pieces[0].ledger.events


def test_a_fresh_sample_may_come_in_physical_batches():
    made = [
        private(DPSAM(RADIUS, "fresh"), sgd(), max_physical_batch_size=size) for size in (None, 2)
    ]
    for each in made:
        run(*each)
    assert close(*(flat(model.parameters()) for _, model, _, _ in made))


# -- what they reduce to --------------------------------------------------------------------


@pytest.mark.parametrize("method", [*TWICE, DPSAM(RADIUS, "fresh")], ids=str)
def test_empty_lots_are_noise_alone(method, seen):
    engine, model, optimizer, loader = private(
        method, sgd(), sample_rate=1e-12, max_grad_norm=C, clipping="per_layer"
    )
    run(engine, model, optimizer, loader, 6)
    assert not any(s.any() for s in seen.sums)
    assert not any(s.any() for s, _ in seen.looks)
    for t, release in enumerate(seen.values):
        assert close(release, SIGMA * C * normals(t), 1e-12)
    for t, (_, look) in enumerate(seen.looks):
        assert close(look, SIGMA * C * normals(t, FIRST_LOOK), 1e-12)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("method", TWICE, ids=str)
def test_one_loss_per_row_in_the_closure_is_the_reduced_loss(method, reduction):
    made = [private(method, sgd(), max_grad_norm=C, loss_reduction=reduction) for _ in range(2)]
    run_reduced(*made[0], reduction)
    engine, model, optimizer, loader = made[1]
    for x, y, _ in lots(engine, loader, STEPS):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            engine.backward(F.cross_entropy(model(x), y, reduction="none"))

        optimizer.step(closure)
    assert close(flat(made[0][1].parameters()), flat(model.parameters()), 1e-12)


class WithLoss(nn.Module):
    """A model that returns its own loss, as those of Hugging Face do."""

    def __init__(self, reduction):
        super().__init__()
        self.net, self.reduction = net(), reduction

    def forward(self, x, y):
        return F.cross_entropy(self.net(x), y, reduction=self.reduction)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_per_example_sam_of_a_model_that_returns_its_loss(reduction, seen):
    engine, model, optimizer, loader = private(
        DPSAMPerExample(RADIUS),
        sgd(),
        WithLoss(reduction),
        loss_reduction=reduction,
        max_grad_norm=C,
    )
    for x, y, _ in lots(engine, loader, 4):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            model(x, y).backward()

        optimizer.step(closure)
    theirs = private(DPSAMPerExample(RADIUS), sgd(), max_grad_norm=C)
    run(*theirs, 4)
    assert close(seen.sums[0], seen.sums[4])
    assert close(flat(model.parameters()), flat(theirs[1].parameters()))


def run_reduced(engine, model, optimizer, loader, reduction):
    for x, y, _ in lots(engine, loader, STEPS):
        optimizer.step(closure_of(model, optimizer, x, y, reduction))


# -- closures that are missing, and steps that fail -----------------------------------------


def failing(model, optimizer, x, y, when, part):
    """A closure whose call number `when` fails, before its backward or after it."""
    whole, calls = closure_of(model, optimizer, x, y), itertools.count(1)

    def closure():
        last = next(calls) == when
        if last and part == "forward":
            model(x)
            raise KeyboardInterrupt
        loss = whole()
        if last:
            raise KeyboardInterrupt
        return loss

    return closure


@pytest.mark.parametrize("part", ["forward", "backward"])
@pytest.mark.parametrize("when", [1, 2])
@pytest.mark.parametrize("method", [*TWICE, Disk(0.5, 0.7)], ids=str)
def test_a_closure_that_fails_leaves_the_weights_at_home_and_is_charged_once(method, when, part):
    engine, model, optimizer, loader = private(method, sgd(), max_grad_norm=C)
    run(engine, model, optimizer, loader, 3)
    home = flat(model.parameters())
    for x, y in loader:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(failing(model, optimizer, x, y, when, part))
        assert torch.equal(flat(model.parameters()), home)
        engine.abandon_lot()
        break
    assert torch.equal(flat(model.parameters()), home)
    assert (engine.released, engine.ledger.steps) == (3, 4)
    looked = isinstance(method, DPSAM)
    multipliers = [e.noise_multiplier for e in engine.ledger.events for _ in range(e.count)]
    usual = SIGMA / math.sqrt(2) if looked else SIGMA
    # A lot that fails before it is looked at has let nothing out: one plain release covers it.
    assert multipliers == pytest.approx([usual] * 3 + [usual if when == 2 else SIGMA])
    run(engine, model, optimizer, loader, 2)
    assert (engine.released, engine.ledger.steps) == (5, 6)


@pytest.mark.parametrize("method", TWICE, ids=str)
def test_the_lot_after_an_abandoned_one_has_nothing_of_it(method, seen):
    """The sums of the lots after the failure are those of the loop."""
    engine, model, optimizer, loader = private(method, sgd(), max_grad_norm=C)
    before, home = None, flat(model.parameters())
    for k, (x, y, rows) in enumerate(lots(engine, loader, 4)):
        if k == 1:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(failing(model, optimizer, x, y, 2, "forward"))
            engine.abandon_lot()
            continue
        optimizer.step(closure_of(model, optimizer, x, y))
        here = gradients(home, *rows)
        if isinstance(method, DPSAM):
            look = seen.looks[-1][1]
            assert close(seen.looks[-1][0], clipped_sum(here, [C], [slice(75)]))
            u = gradients(home + RADIUS * look / look.norm(), *rows)
        elif isinstance(method, DPSAMPerExample):
            moves = [RADIUS * g / g.norm() for g in here]
            one = [(rows[0][i : i + 1], rows[1][i : i + 1]) for i in range(len(here))]
            u = torch.cat([gradients(home + m, *r) for m, r in zip(moves, one, strict=True)])
        else:
            d = 0.0 if before is None else home - before
            u = method.weight * gradients(home + 0.5 * d, *rows) + (1 - method.weight) * here
        assert close(seen.sums[-1], clipped_sum(u, [C], [slice(75)]))
        before, home = home, flat(model.parameters())


def test_no_two_first_looks_share_their_noise(seen):
    """The first look of a lot that failed was let out: it is the ascent's direction, and saved."""
    engine, model, optimizer, loader = private(DPSAM(RADIUS), sgd(), max_grad_norm=C)
    for k, (x, y, _) in enumerate(lots(engine, loader, 3)):
        if k == 1:
            with pytest.raises(KeyboardInterrupt):
                optimizer.step(failing(model, optimizer, x, y, 2, "forward"))
            engine.abandon_lot()
            assert torch.equal(engine.state_dict()["ascent"]["direction"], seen.looks[1][1])
        else:
            optimizer.step(closure_of(model, optimizer, x, y))
    for lot, (total, look) in enumerate(seen.looks):
        assert close(look - total, SIGMA * C * normals(lot, FIRST_LOOK))
    for step, (total, release) in enumerate(zip(seen.sums, seen.values, strict=True)):
        assert close(release - total, SIGMA * C * normals(step))
    assert len(seen.looks) == 3


def test_a_lot_is_not_looked_at_again_after_a_failure(seen):
    """With dropout its sum would be another, under the same noise."""
    engine, model, optimizer, loader = private(DPSAM(RADIUS), sgd(), max_grad_norm=C)
    for x, y in loader:
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(failing(model, optimizer, x, y, 2, "forward"))
        with pytest.raises(PrivacyError, match="was looked at before"):
            optimizer.step(closure_of(model, optimizer, x, y))
        engine.abandon_lot()
        break
    assert len(seen.looks) == engine.ledger.steps == 1
    run(engine, model, optimizer, loader, 2)
    assert engine.ledger.steps == 3


def test_a_batch_that_was_summed_does_not_count_again_after_a_failure(monkeypatch):
    """Per-example SAM is interrupted when its rows are in the sum: they would count twice."""
    engine, model, optimizer, loader = private(DPSAMPerExample(RADIUS), sgd(), max_grad_norm=C)
    collector = engine._run.capture.collector
    finish = collector.finish

    def interrupted():
        finish()
        raise KeyboardInterrupt

    for x, y, rows in lots(engine, loader, 1):
        assert len(rows[0])
        monkeypatch.setattr(collector, "finish", interrupted)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(closure_of(model, optimizer, x, y))
        monkeypatch.undo()
        with pytest.raises(PrivacyError, match="abandon_lot"):
            optimizer.step(closure_of(model, optimizer, x, y))
        engine.abandon_lot()
    assert (engine.released, engine.ledger.steps) == (0, 1)


def test_a_step_of_two_points_that_is_tried_again_has_the_same_sum(seen):
    """The second closure fails in its forward pass (out of memory); the step is called again."""
    for attempts in (1, 2):
        engine, model, optimizer, loader = private(Disk(0.5, 0.7), sgd(), max_grad_norm=100.0)
        run(engine, model, optimizer, loader, 2)
        for x, y in loader:
            if attempts == 2:
                with pytest.raises(KeyboardInterrupt):
                    optimizer.step(failing(model, optimizer, x, y, 2, "forward"))
            optimizer.step(closure_of(model, optimizer, x, y))
            break
    assert close(seen.sums[2], seen.sums[5])
