"""A filter's estimate as the memory in the query: Kalman and DOPPLER with beta below 1.

Releases, branches and estimates follow references of a few lines, the sums those of a loop over
examples, the noise is drawn again: 20 steps in float64, to 1e-9.
"""

from __future__ import annotations

import io
import math

import pytest
import torch

from tests.support.small_runs import LOT, SIGMA, STEPS, N, closure_of, flat, private, run
from tests.support.two_looks import (
    SEGMENTS,
    clipped_sum,
    close,
    gradients,
    lots,
    normals,
    sgd,
    watch,
)
from vestige import ConfigError
from vestige.methods import Doppler, Kalman
from vestige.release.door import Branch, ClippedSum, Position
from vestige.updates.adam import AdamBC
from vestige.updates.estimated import EstimatedMemory
from vestige.updates.filters import SECOND_ORDER, DopplerFilter

C, LR = 1.5, 0.3


@pytest.fixture
def seen(monkeypatch):
    return watch(monkeypatch)


class KalmanReference:
    """One gain for each segment, from the mean excess of the moves over the known noise."""

    def __init__(self, segments):
        self.parts = [(at, [], []) for at in segments]
        self.estimate = torch.zeros(75, dtype=torch.float64)

    def see(self, y, std):
        for at, values, stds in self.parts:
            values.append(y[at])
            stds.append(std)
            t = len(values) - 1
            excess = [
                float((values[k] - values[k - 1]).square().mean()) - stds[k] ** 2 - stds[k - 1] ** 2
                for k in range(1, t + 1)
            ]
            r = max(0.0, sum(excess) / max(1, t)) / std**2
            gain = max((-r + math.sqrt(r * r + 4 * r)) / 2, 1 / (t + 1)) if t else 1.0
            self.estimate[at] += gain * (y[at] - self.estimate[at])


class DopplerReference:
    """m_t = sum_k b_k y_(t-k) - sum_k a_k m_(t-k), over what the unit step makes of it."""

    def __init__(self, a, b):
        self.a, self.b, self.inputs, self.outputs, self.gains = a, b, [], [], []

    def see(self, y, std):
        self.inputs.append(y)
        ones = [1.0] * len(self.inputs)
        self.outputs.append(self._next(self.inputs, self.outputs))
        self.gains.append(self._next(ones, self.gains))
        self.estimate = self.outputs[-1] / self.gains[-1]

    def _next(self, inputs, outputs):
        t = len(inputs) - 1
        taps = sum(b * inputs[t - k] for k, b in enumerate(self.b) if k <= t)
        return taps - sum(a * outputs[t - k] for k, a in enumerate(self.a, 1) if k <= t)


def table(beta):
    return [beta(t) for t in range(STEPS)] if callable(beta) else [beta] * STEPS


SCHEDULES = [0.7, 0.2, lambda t: 0.4 + 0.02 * t, lambda t: 1.0 if t % 3 == 1 else 0.5]
CASES = [
    (Kalman, {}, "flat", lambda: KalmanReference(SEGMENTS["flat"])),
    (Kalman, {}, "per_layer", lambda: KalmanReference(SEGMENTS["per_layer"])),
    (Doppler, {"smoothing": 0.2}, "flat", lambda: DopplerReference((-0.8,), (0.2,))),
    (Doppler, {"order": 2}, "per_layer", lambda: DopplerReference(*SECOND_ORDER)),
]


@pytest.mark.parametrize("beta", SCHEDULES)
@pytest.mark.parametrize(("kind", "settings", "clipping", "reference"), CASES)
def test_the_query_mixes_the_sum_with_the_estimate(kind, settings, clipping, reference, beta, seen):
    """release = beta s + (1 - beta) estimate + noise, the estimate from (release - branch) / beta.

    And the optimizer gets the release as it is.
    """
    engine, model, optimizer, loader = private(
        kind(**settings, beta=beta), sgd(LR), steps=STEPS, clipping=clipping, max_grad_norm=C
    )
    theta, ours, betas = flat(model.parameters()), reference(), table(beta)
    bounds = [C / math.sqrt(len(SEGMENTS[clipping]))] * len(SEGMENTS[clipping])
    for t, (x, y, rows) in enumerate(lots(engine, loader, STEPS)):
        optimizer.step(closure_of(model, optimizer, x, y))
        total = clipped_sum(gradients(theta, *rows), bounds, SEGMENTS[clipping])
        branch = torch.zeros_like(theta)
        if t and betas[t] < 1:
            branch = (1 - betas[t]) * ours.estimate
            assert close(seen.branches[t], branch)
        else:
            assert seen.branches[t] is None
        assert close(seen.sums[t], total)
        assert close(seen.values[t], betas[t] * total + branch + SIGMA * C * normals(t))
        theta = theta - LR * seen.values[t] / LOT
        assert close(flat(model.parameters()), theta)
        ratio = float(branch.norm() / seen.values[t].norm())
        told = engine.diagnostics()
        assert (told["groups"], told["step"]) == (["all"], t)
        assert told["beta"] == pytest.approx(betas[t], rel=1e-12)
        assert told["memory_ratio"] == pytest.approx([ratio], rel=1e-9)
        ours.see((seen.values[t] - branch) / betas[t], SIGMA * C / betas[t])
    charged = [e.noise_multiplier for e in engine.ledger.events for _ in range(e.count)]
    assert charged == pytest.approx([SIGMA / b for b in betas], rel=1e-12)
    assert {e.sample_rate for e in engine.ledger.events} == {LOT / N}


def test_the_memory_matters(seen):
    """The yardstick: the branch is no small part of the releases above."""
    engine, *rest = private(Kalman(beta=0.5), sgd(LR), max_grad_norm=C)
    run(engine, *rest)
    shares = [b.norm() / v.norm() for b, v in zip(seen.branches[1:], seen.values[1:], strict=True)]
    assert min(shares) > 0.05
    assert engine.diagnostics()["memory_ratio"][0] == pytest.approx(float(shares[-1]), rel=1e-9)


@pytest.mark.parametrize("one", [1, 1.0, [1.0] * STEPS, lambda t: 1.0])
@pytest.mark.parametrize("kind", [Kalman, Doppler])
def test_a_beta_of_one_is_the_filter_after_the_release(kind, one):
    ours, theirs = (private(kind(beta=b), sgd(LR), steps=STEPS) for b in (one, 1.0))
    run(*ours)
    run(*theirs)
    assert ours[0].parts.get("memory") is None
    assert ours[0].parts.get("filter") is not None
    assert torch.equal(flat(ours[1].parameters()), flat(theirs[1].parameters()))
    after = private("dp-sgd", sgd(LR), denoiser=kind(), clipping=kind.clipping)
    run(*after)
    assert torch.equal(flat(ours[1].parameters()), flat(after[1].parameters()))
    below = private(kind(beta=0.9), sgd(LR))
    run(*below)
    assert not torch.equal(flat(below[1].parameters()), flat(after[1].parameters()))


def test_the_corrected_adam_knows_the_noise_in_the_query():
    """Given the past the branch is a constant: the noise of a release is sigma C, not sigma C
    over beta."""
    engine, model, optimizer, loader = private(
        Kalman(beta=0.5), lambda p: AdamBC(p, lr=0.001), max_grad_norm=C
    )
    run(engine, model, optimizer, loader, 3)
    for parameter in model.parameters():
        expected = (SIGMA * C / LOT) ** 2
        assert optimizer.noise_variances[id(parameter)] == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("method", [Kalman(beta=0.6), Doppler(2, beta=0.6)], ids=str)
def test_saving_in_the_middle_continues_bit_for_bit(method, seen):
    made = [private(method, sgd(LR)) for _ in range(3)]
    run(*made[0], 13)
    run(*made[1], 6)
    buffer = io.BytesIO()
    torch.save([made[1][0].state_dict(), made[1][1].state_dict()], buffer)
    buffer.seek(0)
    state, weights = torch.load(buffer, weights_only=True)
    engine, model, *rest = made[2]
    memory = state["memory"]
    for bad in (
        None,
        {},
        memory | {"estimate": memory["estimate"][:-1]},
        memory | {"filter": None},
        memory | {"filter": memory["filter"] | {"count": -1}},
    ):
        with pytest.raises(ConfigError, match=r"saved (memory|filter) does not fit"):
            engine.load_state_dict(state | {"memory": bad})
    assert engine.released == 0
    engine.load_state_dict(state)
    model.load_state_dict(weights)
    run(engine, model, *rest, 7)
    assert torch.equal(flat(model.parameters()), flat(made[0][1].parameters()))
    # The first branch after the break is that of the uninterrupted run.
    assert torch.equal(seen.branches[13 + 6], seen.branches[6])
    assert engine.ledger.events == made[0][0].ledger.events


def test_an_abandoned_lot_leaves_the_memory_alone(seen):
    engine, model, optimizer, loader = private(Kalman(beta=0.6), sgd(LR))
    run(engine, model, optimizer, loader, 3)
    before = engine.state_dict()["memory"]
    for _ in loader:
        branch = engine.parts["memory"].branch.values.clone()
        engine.abandon_lot()
        break
    after = engine.state_dict()["memory"]
    assert torch.equal(before["estimate"], after["estimate"])
    assert before["filter"]["count"] == after["filter"]["count"] == 3
    run(engine, model, optimizer, loader, 1)
    assert torch.equal(seen.branches[3], branch)
    charged = [e.noise_multiplier for e in engine.ledger.events for _ in range(e.count)]
    assert charged == pytest.approx([SIGMA / 0.6] * 5)


def test_the_memory_takes_releases_only():
    like = torch.zeros(75, dtype=torch.float64)
    memory = EstimatedMemory(DopplerFilter(like, (), (1.0,)), like, 0.5, Position())
    for raw in (like, ClippedSum(like, (1.0,)), [0.0] * 75, None):
        with pytest.raises(TypeError, match=f"releases only, not a {type(raw).__name__}"):
            memory.released(raw, None)
    memory.lot_begins()
    assert memory.branch is None  # nothing was released yet
    with pytest.raises(TypeError, match="memory of releases"):
        Branch(like, 0)


@pytest.mark.parametrize("beta", [0, 0.0, -0.5, 1.5, math.nan, "half", [], [0.5, 2.0], True])
@pytest.mark.parametrize("kind", [Kalman, Doppler])
def test_a_bad_beta_is_refused(kind, beta):
    with pytest.raises(ConfigError, match="beta"):
        kind(beta=beta)


def test_a_function_of_the_step_needs_their_number():
    with pytest.raises(ConfigError, match="pass steps="):
        private(Kalman(beta=lambda t: 0.5 + t / 100))
    with pytest.raises(ConfigError, match=r"beta=2.0 must be in \(0, 1\]"):
        private(Kalman(beta=lambda t: 2.0), steps=4)
    for method in (Kalman(beta=0.5), Doppler(beta=0.5)):
        with pytest.raises(ConfigError, match="no filter of releases alone"):
            private("dp-sgd", denoiser=method)
