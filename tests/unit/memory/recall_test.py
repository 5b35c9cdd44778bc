"""The memory at work: history, recall, diagnostics, saving, schedules, and what it refuses."""

from __future__ import annotations

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.support.memory_runs import net, private, run, step, weights
from vestige import ConfigError, PrivacyError, methods
from vestige.memory import spectrum
from vestige.memory.history import History
from vestige.memory.rules import SpectralMemory
from vestige.methods import FO, SMA, PostFM
from vestige.release.door import Door

REMEMBERING = ["fo", "sma", "uniform", "exponential", "post-fm", "sma-shuffled", "sma-fixed"]


# -- the history ----------------------------------------------------------------------------


# -- the rules at their edges ---------------------------------------------------------------


# -- in the engine --------------------------------------------------------------------------


@pytest.mark.parametrize("name", REMEMBERING)
def test_releases_in_host_memory_change_no_weight(name):
    here, there = private(name), private(name, history_device="cpu")
    run(*here, 9)
    run(*there, 9)
    assert torch.equal(weights(here[1]), weights(there[1]))
    told = [
        {k: v for k, v in one[0].state_dict().items() if k in ("plan", "released")}
        for one in (here, there)
    ]
    assert told[0] == told[1]  # so that a checkpoint of one goes on in the other


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


def test_post_fm_with_a_window_of_one_moves_by_beta_times_the_release():
    seen = {}
    for window in (1, 2):
        engine, model, optimizer, loader = private(PostFM(0.5, window=window))
        run(engine, model, optimizer, loader, 1)
        seen[window] = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert torch.equal(seen[1], seen[2])
