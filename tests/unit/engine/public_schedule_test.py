"""Noise and clip bounds that move by a public table: charged as drawn, drawn as charged."""

from __future__ import annotations

from dataclasses import replace

import dp_accounting
import numpy as np
import pytest
import torch
from dp_accounting import pld

from tests.support.loops import epoch, mlp, private, records
from tests.support.noise_law import is_noise
from vestige import PrivacyEngine
from vestige.compat.faces import run_of
from vestige.engine.public_schedule import ClipFactors, NoiseSchedule
from vestige.errors import BudgetExhausted, ConfigError, PrivacyError
from vestige.release.door import Door
from vestige.release.observer import Observer

LOTS, RATE, DELTA = 4, 6 / 24, 1e-5
FACTORS = [0.9**call for call in range(20)]


class Tape(Observer):
    """The order of charges and draws, and the noise of every release over its bound."""

    def __init__(self):
        self.noise, self.bounds, self.order = [], [], []

    def charged(self, event):
        self.order.append(("charged", event.noise_multiplier))

    def drawing(self, passage):
        self.order.append(("drawing", passage.step))

    def released(self, passage):
        self.noise.append((passage.values - passage.total).numpy() / passage.bounds[0])
        self.bounds.append(passage.bounds[0])


def trained(epochs=3, each="epoch", kind=NoiseSchedule, factors=FACTORS, **options):
    """A run with a schedule: its engine and what the door saw of it."""
    engine, model, optimizer, loader = private(**options)
    schedule, tape = kind(run_of(optimizer), factors, "Instead.", each), Tape()
    engine.door.observers.append(tape)
    for _ in range(epochs):
        epoch(model, optimizer, loader, schedule.advance if each == "release" else lambda: None)
        if each == "epoch":
            schedule.advance()
    return engine, tape


def composed(sigmas):
    """Epsilon of these releases, by dp_accounting alone."""
    accountant = pld.PLDAccountant(dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE, 1e-3)
    for sigma in sigmas:
        gaussian = dp_accounting.GaussianDpEvent(sigma)
        accountant.compose(dp_accounting.PoissonSampledDpEvent(RATE, gaussian))
    return accountant.get_epsilon(DELTA)


def expected(each, epochs=3):
    return [FACTORS[t if each == "release" else t // LOTS] for t in range(epochs * LOTS)]


def is_charged_as_drawn(engine, each, epochs=3):
    return engine.get_epsilon(DELTA) == pytest.approx(composed(expected(each, epochs)), rel=2e-3)


@pytest.mark.parametrize("each", ["epoch", "release"])
def test_epsilon_is_that_of_the_steps_composed_one_by_one(each):
    engine, tape = trained(each=each, epochs=2)
    sigmas = expected(each, 2)
    assert [e.noise_multiplier for e in engine.ledger.events for _ in range(e.count)] == sigmas
    assert is_charged_as_drawn(engine, each, 2)
    assert tape.order == [
        what for t, s in enumerate(sigmas) for what in (("charged", s), ("drawing", t))
    ]


@pytest.mark.parametrize("each", ["epoch", "release"])
def test_charging_the_first_noise_throughout_is_caught(each, monkeypatch):
    right = Door._event
    monkeypatch.setattr(Door, "_event", lambda door, charge, step: right(door, charge, 0))
    engine, _ = trained(each=each, epochs=2)
    assert engine.ledger.steps == 2 * LOTS and not is_charged_as_drawn(engine, each, 2)


@pytest.mark.parametrize("kind", [NoiseSchedule, ClipFactors])
def test_the_noise_that_is_drawn_has_the_scheduled_variance(kind):
    model = torch.nn.Sequential(torch.nn.Linear(5, 2000), torch.nn.Linear(2000, 3))
    _, tape = trained(model=model, kind=kind)
    factors = np.repeat(FACTORS[:3], LOTS)
    sigmas = factors if kind is NoiseSchedule else np.ones(3 * LOTS)
    for noise, sigma in zip(tape.noise, sigmas, strict=True):
        assert is_noise(noise, sigma)
        assert not is_noise(noise, sigma * 0.9) and not is_noise(noise, sigma / 0.9)
    assert np.allclose(tape.bounds, factors if kind is ClipFactors else 1.0)


def test_drawing_the_first_noise_throughout_is_caught(monkeypatch):
    monkeypatch.setattr(Door, "noise", property(lambda door: door.scales[0]))
    model = torch.nn.Sequential(torch.nn.Linear(5, 2000), torch.nn.Linear(2000, 3))
    _, tape = trained(model=model)
    laws = [is_noise(n, s) for n, s in zip(tape.noise, expected("epoch"), strict=True)]
    assert laws == [True] * LOTS + [False] * 2 * LOTS


def test_the_clip_bound_costs_the_same_wherever_it_goes():
    engine, _ = trained(kind=ClipFactors)
    assert engine.ledger.merged() == (replace(engine.ledger.merged()[0], count=3 * LOTS),)
    assert engine.plan.clipping == "scheduled, flat, public factors from 0.729 to 1"
    text = engine.statement(DELTA)["mechanism"]["text"]
    assert "times a factor of the release's number alone" in text


def test_groups_keep_their_own_noise_and_the_plan_tells_what_was_used():
    options = {"clipping": "per_layer", "group_noise_multipliers": [1.0, 2.0]}
    engine, _ = trained(**options)
    joint = 1 / np.sqrt(1 + 1 / 4)
    assert np.allclose(engine.plan.noise_multiplier[::LOTS], joint * np.array(FACTORS[:4]))
    rows = np.array(engine.plan.noise_stds)
    assert np.allclose(rows[:, 1] / rows[:, 0], 2)
    assert engine.statement(DELTA)["calibration"]["noise_multiplier"]["smallest"] < 0.7


@pytest.mark.parametrize("each", ["epoch", "release"])
def test_a_run_of_known_length_plans_all_of_its_noise_before_the_first_lot(each):
    engine, *_ = trained(epochs=0, each=each, steps=3 * LOTS)
    assert list(engine.plan.noise_multiplier) == expected(each)


def test_a_run_that_was_stopped_early_claims_all_of_its_plan():
    """As the same table in make_private does, whether or not the scheduler was called so far."""
    engine, model, optimizer, loader = private(steps=3 * LOTS)
    NoiseSchedule(run_of(optimizer), [1.0, 0.2, 0.2], "Instead.")
    table = [1.0] * LOTS + [0.2] * 2 * LOTS
    other, model_2, optimizer_2, loader_2 = private(noise_multiplier=table, steps=3 * LOTS)
    epoch(model, optimizer, loader, limit=2)
    epoch(model_2, optimizer_2, loader_2, limit=2)
    claims = [one.statement(DELTA)["guarantee"]["epsilon"] for one in (engine, other)]
    assert claims[0] == claims[1] > 20


def test_calls_come_when_it_was_declared():
    """Otherwise the loop could choose the noise by what it sees."""
    schedule, model, optimizer, loader = started()
    epoch(model, optimizer, loader, limit=1)
    with pytest.raises(PrivacyError, match="call 1 came after 1 releases"):
        schedule.advance()
    epoch(model, optimizer, loader, limit=LOTS - 1)
    with pytest.raises(PrivacyError, match="call 1 was left out after 4 releases"):
        epoch(model, optimizer, loader, limit=1)
    with pytest.raises(ConfigError, match="every='week' is not when"):
        started(every="week")


def test_factors_to_come_may_not_change_in_a_run_that_goes_on(tmp_path):
    engine, model, optimizer, loader, schedule = resumable(tmp_path / "none")
    epoch(model, optimizer, loader)
    schedule.advance()
    state = engine.state_dict()
    engine, _, optimizer, _ = private(engine=PrivacyEngine(noise_seed=11))
    NoiseSchedule(run_of(optimizer), [*FACTORS[:3], *[0.3] * 17], "Instead.")
    with pytest.raises(ConfigError, match="other factors"):
        engine.load_state_dict(state)


def test_pieces_of_a_lot_are_no_releases():
    whole, _ = trained(each="release")
    pieces, _ = trained(each="release", max_physical_batch_size=2)
    assert pieces.ledger.events == whole.ledger.events


def started(every="epoch"):
    _, model, optimizer, loader = private()
    return NoiseSchedule(run_of(optimizer), FACTORS, "Instead.", every), model, optimizer, loader


def test_calls_at_other_moments_and_calls_left_out_are_refused():
    schedule, model, optimizer, loader = started()
    with pytest.raises(PrivacyError, match=r"call 1 came after 0 releases.*Instead"):
        schedule.advance()
    epoch(model, optimizer, loader, limit=2)
    with pytest.raises(PrivacyError, match="call 1 came after 2 releases"):
        schedule.advance()
    schedule, model, optimizer, loader = started("release")
    epoch(model, optimizer, loader, schedule.advance, limit=2)
    with pytest.raises(PrivacyError, match="call 3 came after 2 releases"):
        schedule.advance()
    epoch(model, optimizer, loader, limit=1)
    with pytest.raises(PrivacyError, match="call 3 was left out after 3 releases"):
        epoch(model, optimizer, loader, limit=1)
    schedule.advance()
    epoch(model, optimizer, loader, schedule.advance, limit=1)


def test_a_call_between_a_batch_and_its_step_is_refused():
    schedule, model, optimizer, loader = started("release")
    epoch(model, optimizer, loader, schedule.advance, limit=1)
    next(iter(loader))
    with pytest.raises(PrivacyError, match="call 2 came after 1 releases"):
        schedule.advance()


@pytest.mark.parametrize("bad", [-0.5, float("nan"), float("inf")])
def test_a_factor_that_is_no_noise_is_refused_when_it_is_due_and_changes_nothing(bad):
    engine, model, optimizer, loader = private()
    schedule = NoiseSchedule(run_of(optimizer), [1.0, bad], "Instead.", "release")
    epoch(model, optimizer, loader, limit=1)
    with pytest.raises(PrivacyError, match="its factor for call 1 is"):
        schedule.advance()
    assert schedule.calls == 0 and engine.plan.noise_multiplier == 1.0


def test_a_schedule_is_refused_where_the_noise_is_settled_otherwise():
    _, model, optimizer, loader = private(noise_multiplier=[1.0, 2.0], steps=2)
    with pytest.raises(PrivacyError, match="has a schedule already"):
        NoiseSchedule(run_of(optimizer), FACTORS, "Instead.")
    _, model, optimizer, loader = private(clipping="quantile")
    with pytest.raises(PrivacyError, match="moved or used otherwise"):
        ClipFactors(run_of(optimizer), FACTORS, "Instead.")
    _, model, optimizer, loader = private(method="dp-ftrl", steps=LOTS)
    with pytest.raises(ConfigError, match="takes one noise multiplier for the whole run"):
        NoiseSchedule(run_of(optimizer), FACTORS, "Instead.")
    _, model, optimizer, loader = private()
    epoch(model, optimizer, loader)
    with pytest.raises(PrivacyError, match="lots were drawn before"):
        NoiseSchedule(run_of(optimizer), FACTORS, "Instead.")


def test_the_guard_stops_before_the_noise_that_is_too_little():
    whole = composed(expected("epoch", 2))
    with pytest.raises(BudgetExhausted):
        trained(epochs=3, max_epsilon=whole * 1.01, delta=DELTA)
    engine, _ = trained(epochs=2, max_epsilon=whole * 1.01, delta=DELTA)
    assert engine.get_epsilon(DELTA) <= whole * 1.01


def test_a_ledger_file_has_every_release_at_its_own_noise(tmp_path):
    engine, _ = trained(engine=PrivacyEngine(noise_seed=11, ledger=tmp_path / "ledger"))
    engine.close()
    again = private(engine=PrivacyEngine(ledger=tmp_path / "ledger"))[0]
    assert again.ledger.merged() == engine.ledger.merged()
    assert is_charged_as_drawn(engine, "epoch")


def resumable(path, **options):
    engine, model, optimizer, loader = private(engine=PrivacyEngine(noise_seed=11), **options)
    schedule = NoiseSchedule(run_of(optimizer), FACTORS, "Instead.")
    if path.exists():
        engine.load_checkpoint(path)
    return engine, model, optimizer, loader, schedule


@pytest.mark.parametrize("early", [True, False], ids=["before the call", "after it"])
@pytest.mark.parametrize("steps", [None, 3 * LOTS])
def test_a_run_that_goes_on_from_a_checkpoint_is_the_same_run(tmp_path, early, steps):
    whole, _ = trained(steps=steps)
    path = tmp_path / "run.pt"
    engine, model, optimizer, loader, schedule = resumable(path, steps=steps)
    for _ in range(2):
        epoch(model, optimizer, loader)
        if early and engine.released == 2 * LOTS:
            engine.save_checkpoint(path)
        schedule.advance()
    if not early:
        engine.save_checkpoint(path)
    engine, model, optimizer, loader, schedule = resumable(path, steps=steps)
    if early:
        schedule.advance()
    epoch(model, optimizer, loader)
    assert engine.ledger.events == whole.ledger.events
    assert engine.plan.noise_multiplier == tuple(expected("epoch"))[: len(engine.plan.noise_stds)]


def test_a_checkpoint_asks_for_the_schedule_that_the_run_had(tmp_path):
    path = tmp_path / "run.pt"
    engine, model, optimizer, loader, schedule = resumable(path)
    epoch(model, optimizer, loader)
    schedule.advance()
    engine.save_checkpoint(path)
    engine, _, optimizer, _ = private(engine=PrivacyEngine(noise_seed=11))
    with pytest.raises(ConfigError, match="had a noise schedule, which this one has not"):
        engine.load_checkpoint(path)
    NoiseSchedule(run_of(optimizer), [1.0, 0.8], "Instead.")
    with pytest.raises(ConfigError, match="noise schedule has other factors"):
        engine.load_checkpoint(path)


@pytest.mark.parametrize(
    "change", [{"period": 3}, {"calls": 2}, {"calls": -1}, {"period": 0}, {"factors": None}]
)
def test_a_damaged_place_is_refused(tmp_path, change):
    engine, model, optimizer, loader, schedule = resumable(tmp_path / "none")
    epoch(model, optimizer, loader)
    schedule.advance()
    state = engine.state_dict()
    state["noise schedule"] |= change
    engine, *_ = resumable(tmp_path / "none")
    with pytest.raises(ConfigError, match="noise schedule has other factors, or another place"):
        engine.load_state_dict(state)


def test_releases_of_neighbours_get_the_same_noise():
    """The schedule follows the number of releases: other records change nothing of it."""
    ours = trained()[0]
    other = trained(dataset=records(seed=9), model=mlp(seed=3))[0]
    assert ours.ledger.events == other.ledger.events
    assert ours.plan.noise_multiplier == other.plan.noise_multiplier
