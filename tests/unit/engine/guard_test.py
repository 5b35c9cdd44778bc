"""The budget guard: the lot that would exceed max_epsilon is never drawn from."""

from __future__ import annotations

import math

import pytest

from tests.support.small_runs import LOT, N, closure_of, private, run
from vestige import BudgetExhausted, ConfigError, PrivacyEngine
from vestige.engine.guard import _last
from vestige.methods import METHODS
from vestige.privacy import accounting
from vestige.privacy.composition import filter_share
from vestige.privacy.ledger import Event, Ledger

DELTA = 1e-5
RATE = LOT / N


def steps_until_stopped(engine, model, optimizer, loader, most=400):
    with pytest.raises(BudgetExhausted) as caught:
        run(engine, model, optimizer, loader, most)
    return engine.released, str(caught.value)


@pytest.mark.parametrize("accountant", ["rdp", "pld"])
@pytest.mark.parametrize("planned", [None, 200])
def test_the_last_affordable_step_is_taken_and_the_next_is_not(accountant, planned):
    made = private("dp-sgd", max_epsilon=20.0, delta=DELTA, steps=planned, accountant=accountant)
    released, message = steps_until_stopped(*made)
    assert accounting.epsilon([Event(RATE, 0.8, released)], DELTA, accountant) <= 20
    assert accounting.epsilon([Event(RATE, 0.8, released + 1)], DELTA, accountant) > 20
    assert made[0].get_epsilon(DELTA) <= 20
    assert "max_epsilon 20" in message
    assert f"after {released} releases" in message


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].private])
def test_no_method_exceeds_its_budget(method):
    """Whatever is charged beside the sum, twice, by cycles or by trees."""
    whole = private(method, noise_multiplier=3.0, steps=40)
    run(*whole, steps=40)
    budget = 0.6 * whole[0].get_epsilon(DELTA)
    engine, *rest = private(method, noise_multiplier=3.0, steps=40, max_epsilon=budget, delta=DELTA)
    released, _ = steps_until_stopped(engine, *rest, most=40)
    assert engine.get_epsilon(DELTA) <= budget
    assert 0 <= released < 40


def test_a_plan_within_the_budget_runs_to_its_end():
    engine, *rest = private("fo", steps=12, max_epsilon=1e6, delta=DELTA)
    run(engine, *rest, steps=12)
    assert engine.released == 12


def test_schedules_are_followed():
    noise = [5.0] * 10 + [0.5] * 10
    engine, *rest = private("dp-sgd", noise_multiplier=noise, steps=20, max_epsilon=9, delta=DELTA)
    released, _ = steps_until_stopped(engine, *rest, most=20)
    spent = [Event(RATE, 5.0, 10)] + [Event(RATE, 0.5, released - 10)] * (released > 10)
    assert accounting.epsilon(spent, DELTA, "rdp") <= 9
    after = [Event(RATE, 5.0, 10), Event(RATE, 0.5, released - 9)]
    assert accounting.epsilon(after, DELTA, "rdp") > 9


def test_a_lot_that_was_given_up_counts():
    engine, _, _, loader = private("dp-sgd", max_epsilon=20, delta=DELTA)
    with pytest.raises(BudgetExhausted):
        for _ in range(100):
            for _ in loader:
                engine.abandon_lot()
    assert engine.released == 0
    assert engine.get_epsilon(DELTA) <= 20


def test_the_budget_holds_across_a_resume():
    first = private("dp-sgd", max_epsilon=20, delta=DELTA)
    whole, _ = steps_until_stopped(*private("dp-sgd", max_epsilon=20, delta=DELTA))
    run(*first, steps=3)
    second = private("dp-sgd", max_epsilon=20, delta=DELTA)
    second[0].load_state_dict(first[0].state_dict())
    released, _ = steps_until_stopped(*second)
    assert released == whole


def test_several_models_on_one_ledger_share_the_budget():
    """The second model's settings may follow the first one's releases: a Rényi filter."""
    ledger = Ledger()
    first = private("dp-sgd", engine_options={"ledger": ledger}, max_epsilon=20, delta=DELTA)
    run(*first, steps=4)
    options = {"ledger": ledger}
    second = private(
        "dp-sgd", engine_options=options, noise_multiplier=1.1, max_epsilon=20, delta=DELTA
    )
    _, message = steps_until_stopped(*second)
    assert "filter" in message
    assert filter_share(ledger.merged(), 20, DELTA) <= 1
    assert filter_share([*ledger.merged(), Event(RATE, 1.1)], 20, DELTA) > 1
    assert accounting.epsilon(ledger.merged(), DELTA, "rdp") <= 20
    # And the first cannot go on either, at its own noise.
    with pytest.raises(BudgetExhausted):
        run(*first, steps=4)


def test_several_runs_on_one_ledger_file_share_the_budget(tmp_path):
    def start(noise):
        return private(
            "dp-sgd",
            engine_options={"ledger": tmp_path / "l"},
            noise_multiplier=noise,
            max_epsilon=20,
            delta=DELTA,
        )

    alone, _ = steps_until_stopped(*private("dp-sgd", max_epsilon=20, delta=DELTA))
    first = start(0.8)
    run(*first, steps=4)
    first[0].detach()
    second = start(0.8)
    released, message = steps_until_stopped(*second)
    assert "filter" in message
    assert second[0].ledger.steps == 4 + released <= alone
    assert second[0].get_epsilon(DELTA) <= 20


def test_the_filter_never_allows_more_than_the_accountant_of_a_fixed_plan():
    for budget in (0.5, 2.0, 8.0):
        for rate, noise in ((0.01, 0.8), (0.1, 1.5), (1.0, 5.0)):
            for count in (1, 10, 100, 1000):
                events = [Event(rate, noise, count)]
                if filter_share(events, budget, DELTA) <= 1:
                    assert accounting.epsilon(events, DELTA, "rdp") <= budget * (1 + 1e-9)


def test_the_filter_is_close_to_the_rényi_accountant_for_gaussians():
    count = _last(lambda n: filter_share([Event(1.0, 20.0, n)], 2.0, DELTA) <= 1, 0, 10_000)
    most = _last(lambda n: accounting.epsilon([Event(1.0, 20.0, n)], DELTA, "rdp") <= 2, 0, 10_000)
    assert 0.97 * most <= count <= most


def test_the_filter_of_nothing_and_of_no_noise():
    assert filter_share([], 1.0, DELTA) == 0
    assert filter_share([Event(0.1, math.inf, 5)], 1.0, DELTA) == 0
    assert filter_share([Event(0.1, 0.0)], 1.0, DELTA) == math.inf


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_epsilon": 0.0, "delta": DELTA}, "max_epsilon=0.0 must be"),
        ({"max_epsilon": math.inf, "delta": DELTA}, "max_epsilon=inf must be"),
        ({"max_epsilon": "3", "delta": DELTA}, "max_epsilon='3' must be"),
        ({"max_epsilon": 3.0}, "without a delta"),
        ({"max_epsilon": 3.0, "delta": 2.0}, "delta 2.0"),
    ],
    ids=["zero", "infinite", "text", "no delta", "bad delta"],
)
def test_a_budget_that_is_none_is_refused(options, says):
    with pytest.raises(ConfigError, match=says):
        private("dp-sgd", **options)


def test_a_target_and_a_budget_share_their_delta():
    from tests.support.small_runs import net

    model = net()
    import torch
    from torch.utils.data import DataLoader, TensorDataset

    engine = PrivacyEngine("rdp")
    engine.make_private_with_epsilon(
        module=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        data_loader=DataLoader(
            TensorDataset(torch.randn(N, 5).double(), torch.zeros(N, dtype=torch.long)),
            batch_size=LOT,
        ),
        target_epsilon=3.0,
        target_delta=DELTA,
        steps=5,
        max_grad_norm=1.0,
        max_epsilon=2.0,
    )
    guard = engine._run.guard
    assert (guard.max_epsilon, guard.delta) == (2.0, DELTA)


def test_lots_that_other_engines_have_in_hand_count():
    ledger = Ledger()
    made = [
        private(
            "dp-sgd", engine_options={"ledger": ledger}, noise_multiplier=2.0, max_epsilon=5.0,
            delta=DELTA,
        )
        for _ in range(6)
    ]  # fmt: skip
    with pytest.raises(BudgetExhausted):
        for _ in range(50):
            drawn = [(one, next(iter(one[3]))) for one in made]
            for (_, model, optimizer, _), (x, y) in drawn:
                optimizer.step(closure_of(model, optimizer, x, y))
    for one in made:
        one[0].abandon_lot()
    assert accounting.epsilon(ledger.merged(), DELTA, "rdp") <= 5.0


def test_a_ledger_with_the_charges_of_another_run_is_a_filter():
    first = private("dp-sgd")
    run(*first, steps=3)
    ledger = Ledger()
    ledger.load_state_dict(first[0].ledger.state_dict())
    second = private("dp-sgd", engine_options={"ledger": ledger}, max_epsilon=20, delta=DELTA)
    assert second[0]._run.guard.filters
    alone = private("dp-sgd", max_epsilon=20, delta=DELTA)
    alone[0].load_state_dict(first[0].state_dict())
    assert not alone[0]._run.guard.filters


def test_a_lot_given_up_under_a_schedule_is_a_filter():
    noise = [2.0 + t / 10 for t in range(20)]
    engine, _, _, loader = private(
        "dp-sgd", noise_multiplier=noise, steps=20, max_epsilon=20, delta=DELTA
    )
    next(iter(loader))
    assert not engine._run.guard.filters
    engine.abandon_lot()
    assert engine._run.guard.filters


def test_the_reported_epsilon_of_a_filter_stays_within_the_budget():
    ledger = Ledger()
    for accountant in ("rdp_classic", "pld"):
        options = {"accountant": accountant, "engine_options": {"ledger": ledger}}
        made = private("dp-sgd", noise_multiplier=2.0, max_epsilon=6.0, delta=DELTA, **options)
        made[0].ledger.engines = 2
        steps_until_stopped(*made)
        assert made[0].get_epsilon(DELTA) <= 6.0


@pytest.mark.parametrize("method", ["geodp", "dp-adam-ac"])
def test_what_has_no_guarantee_has_no_budget(method):
    with pytest.raises(ConfigError, match="has no guarantee"):
        private(method, max_epsilon=3.0, delta=DELTA)
    with pytest.raises(ConfigError, match="has no guarantee"):
        private("dp-sgd", noise_multiplier=0.0, max_epsilon=3.0, delta=DELTA)


def test_a_filter_over_many_different_events_is_quick_and_above_the_exact_one():
    events = [Event(0.01, 1 + t / 1000) for t in range(1500)]
    exact = sum(filter_share([e], 8.0, DELTA) for e in events[50::100]) * 100
    assert filter_share(events, 8.0, DELTA) >= 0.99 * exact


def test_a_lot_that_was_drawn_before_a_second_engine_came_counts():
    first = private("dp-sgd", noise_multiplier=1.0)
    x, y = next(iter(first[3]))
    options = {"engine_options": {"ledger": first[0].ledger}}
    second = private("dp-sgd", noise_multiplier=2.0, max_epsilon=8.0, delta=DELTA, **options)
    steps_until_stopped(*second)
    first[2].step(closure_of(first[1], first[2], x, y))
    assert accounting.epsilon(first[0].ledger.merged(), DELTA, "rdp") <= 8.0
    assert first[0].ledger.pending == {}


def test_steps_lost_under_a_schedule_are_a_filter():
    noise = [2.0 + t / 10 for t in range(20)]
    engine, *_ = private("dp-sgd", noise_multiplier=noise, steps=20, max_epsilon=20, delta=DELTA)
    assert not engine._run.guard.filters
    engine._run.door.lost = 3
    assert engine._run.guard.filters
