"""How a run ends and what its claim counts for it; and the epsilon that is shown on the way."""

from __future__ import annotations

import json
import math
import signal

import pytest

from tests.support.small_runs import LOT, N, private, run
from vestige import BudgetExhausted, statement
from vestige.engine.ending import ending, stopped
from vestige.methods import METHODS
from vestige.privacy import accounting
from vestige.privacy.accounting import computed_every, epsilon_on_the_way
from vestige.privacy.composition import filter_epsilon, filter_share, renyi, renyi_orders
from vestige.privacy.ending import Ending
from vestige.privacy.ledger import Event, Ledger
from vestige.train import training
from vestige.train.config import TrainConfig

DELTA = 1e-5
RATE = LOT / N


def claimed(engine):
    """The ending of an engine's run, and the epsilon that its statement claims."""
    found = engine.statement(DELTA)
    statement.check(found)
    assert found["guarantee"]["end"]["text"] in statement.markdown(found)
    return found["guarantee"]["end"]["kind"], found["guarantee"]["epsilon"]


# -- the claim of a run that was stopped ------------------------------------------------------


@pytest.mark.parametrize("method", [m for m in METHODS if METHODS[m].private])
def test_a_run_that_was_stopped_claims_what_was_planned(method):
    """Whatever is charged beside the sum, twice, by cycles or by trees."""
    whole = private(method, steps=12)
    run(*whole, steps=12)
    planned = whole[0].get_epsilon(DELTA)
    assert claimed(whole[0]) == ("as planned", planned)
    for made in (1, 5, 8):
        engine, *rest = private(method, steps=12)
        run(engine, *rest, steps=made)
        kind, epsilon = claimed(engine)
        assert kind == "planned releases"
        # In the middle of an epoch dp-is counts one more measurement of all records.
        assert planned * (1 - 1e-9) <= epsilon <= planned * (1 + 1e-4)


def test_a_schedule_is_kept_to_its_end():
    noise = [2.0] * 4 + [1.0] * 4
    engine, *rest = private("dp-sgd", noise_multiplier=noise, steps=8)
    run(engine, *rest, steps=3)
    planned = [Event(RATE, 2.0, 4), Event(RATE, 1.0, 4)]
    assert claimed(engine) == ("planned releases", accounting.epsilon(planned, DELTA, "rdp"))


def test_a_statement_in_the_middle_of_a_lot_counts_that_lot():
    engine, *rest = private("dp-sgd", steps=8)
    run(engine, *rest, steps=3)
    next(iter(rest[-1]))
    planned = accounting.epsilon([Event(RATE, 0.8, 8)], DELTA, "rdp")
    assert claimed(engine) == ("planned releases", planned)


def test_before_the_first_release_nothing_was_seen():
    engine, *_ = private("dp-sgd", steps=8)
    assert ending(engine._run).unmade == ()
    assert engine.statement(DELTA)["guarantee"]["epsilon"] == 0
    # A run that is killed later, with the state of now, may have released something.
    assert stopped(engine._run).unmade == (Event(RATE, 0.8, 8),)


def test_without_a_planned_number_the_statement_says_what_it_rests_on():
    engine, *rest = private("dp-sgd")
    run(engine, *rest, steps=3)
    assert claimed(engine) == ("open", engine.get_epsilon(DELTA))
    said = engine.statement(DELTA)["warnings"]
    assert any("looked neither at releases" in warning for warning in said)


def test_beyond_the_plan_the_end_is_open_again():
    engine, *rest = private("dp-sgd", steps=2)
    with pytest.warns(UserWarning, match="beyond the 2 steps"):
        run(engine, *rest, steps=3)
    assert claimed(engine) == ("open", engine.get_epsilon(DELTA))


@pytest.mark.parametrize("planned", [None, 200])
def test_a_guard_that_counts_a_fixed_plan_ends_at_a_public_point(planned):
    engine, *rest = private("dp-sgd", max_epsilon=12, delta=DELTA, steps=planned)
    with pytest.raises(BudgetExhausted):
        run(engine, *rest, steps=200)
    assert claimed(engine) == ("budget guard", engine.get_epsilon(DELTA))


def test_stopped_before_its_guard_a_run_claims_what_the_guard_would_let_through():
    whole = private("dp-sgd", max_epsilon=12, delta=DELTA, steps=200)
    with pytest.raises(BudgetExhausted):
        run(*whole, steps=200)
    engine, *rest = private("dp-sgd", max_epsilon=12, delta=DELTA, steps=200)
    run(engine, *rest, steps=2)
    assert claimed(engine) == ("planned releases", whole[0].get_epsilon(DELTA))


def shared(steps, max_epsilon=12.0, noise=1.1):
    """A second engine on a ledger that a first one has charged: its guard is a Rényi filter."""
    ledger = Ledger()
    first = private("dp-sgd", engine_options={"ledger": ledger}, steps=2)
    run(*first, steps=2)
    return private(
        "dp-sgd", engine_options={"ledger": ledger}, noise_multiplier=noise, steps=steps,
        max_epsilon=max_epsilon, delta=DELTA,
    )  # fmt: skip


@pytest.mark.parametrize("planned", [None, 400])
def test_a_run_under_a_rényi_filter_claims_its_budget(planned):
    for made in (2, 400):
        engine, *rest = shared(planned)
        if made == 2:
            run(engine, *rest, steps=2)
        else:
            with pytest.raises(BudgetExhausted, match="filter"):
                run(engine, *rest, steps=400)
        assert filter_share(engine.ledger.merged(), 12, DELTA) <= 1
        assert claimed(engine) == ("renyi filter", 12.0)
        found = engine.statement(1e-6)
        assert found["guarantee"]["epsilon"] > 12
        assert "whatever was seen" in found["guarantee"]["end"]["text"]


@pytest.mark.parametrize("planned", [None, 400])
@pytest.mark.parametrize("guarded_first", [True, False])
def test_a_filter_claims_nothing_for_what_others_have_charged_past_it(planned, guarded_first):
    """A second engine without a guard charges the same ledger: the first one's budget is broken."""
    engine, *rest = shared(planned) if not guarded_first else private(
        "dp-sgd", max_epsilon=12.0, delta=DELTA, steps=planned
    )  # fmt: skip
    run(engine, *rest, steps=2)
    before = stopped(engine._run)
    other = private("dp-sgd", engine_options={"ledger": engine.ledger}, noise_multiplier=0.5)
    run(*other, steps=20)
    spent = engine.ledger.merged()
    assert filter_share(spent, 12, DELTA) > 1 and engine.get_epsilon(DELTA) > 12
    kind, epsilon = claimed(engine)
    assert kind == ("open" if planned is None else "planned releases")
    assert epsilon >= engine.get_epsilon(DELTA)
    # So does the claim of a run that was killed before the other one began.
    assert before.epsilon(spent, DELTA, "rdp") >= engine.get_epsilon(DELTA)
    with pytest.raises(BudgetExhausted, match="filter"):
        run(engine, *rest, steps=1)


def test_the_statement_of_a_saved_filter_is_over_what_the_ledger_holds_now():
    engine, *rest = shared(None)
    run(engine, *rest, steps=2)
    others = [Event(0.5, 0.5, 100)]
    found = statement.build(
        engine.plan, engine.door.own.events, delta=DELTA, accountant="rdp", released=2,
        repeatable=False, caveats=[], earlier=others, ending=stopped(engine._run),
    )  # fmt: skip
    statement.check(found)
    every = [*engine.door.own.events, *others]
    assert found["guarantee"]["epsilon"] == accounting.epsilon(every, DELTA, "rdp") > 12
    assert found["guarantee"]["end"]["kind"] == "open"


def test_a_plan_that_fits_its_filter_keeps_the_plan():
    engine, *rest = shared(5, max_epsilon=60.0)
    run(engine, *rest, steps=2)
    planned = [Event(RATE, 0.8, 2), Event(RATE, 1.1, 5)]
    epsilon = accounting.epsilon(planned, DELTA, "rdp")
    assert claimed(engine) == ("planned releases", pytest.approx(epsilon))


def test_what_a_filter_lets_through_has_an_epsilon_at_every_delta():
    """No sequence within the filter costs more than its closed form, at any delta."""
    for budget in (0.5, 3.0, 12.0):
        assert filter_epsilon(budget, DELTA, DELTA) == budget
        for rate, noise in ((0.01, 0.8), (0.1, 1.5), (1.0, 5.0)):
            count = 1
            while filter_share([Event(rate, noise, 2 * count)], budget, DELTA) <= 1:
                count *= 2
            events = (Event(rate, noise, count),)
            if filter_share(events, budget, DELTA) > 1:
                continue
            for delta in (1e-9, 1e-7, 1e-5, 1e-3):
                bound = filter_epsilon(budget, DELTA, delta)
                assert accounting.epsilon(events, delta, "rdp") <= bound * (1 + 1e-9)
    # And it is the conversion of one order, nothing more favourable.
    moments, orders = renyi((Event(1.0, 5.0),)), renyi_orders()
    budgets = [
        moment + math.log1p(-1 / order) - (math.log(DELTA) + math.log(order)) / (order - 1)
        for moment, order in zip(moments, orders, strict=True)
    ]
    best = min(budgets)
    assert filter_epsilon(best, DELTA, 1e-7) >= accounting.epsilon([Event(1.0, 5.0)], 1e-7, "rdp")


def test_an_ending_survives_its_json():
    for one in (
        Ending("planned releases", (Event(0.1, 1.0, 7), Event(0.1, math.inf, 2))),
        Ending("renyi filter", limit=(3.0, 1e-6)),
        Ending("as planned"),
    ):
        assert Ending.restored(json.loads(json.dumps(one.state()))) == one


# -- the epsilon that is shown on the way -----------------------------------------------------


def config(**changes):
    values = {
        "model": "linear", "train_size": 40, "test_size": 20, "lot": 8, "device": "cpu",
        "accountant": "pld", "noise_multiplier": None if "epsilon" in changes else 1.0,
    }  # fmt: skip
    return TrainConfig(**values | changes)


def trained(tmp_path, **changes):
    """The result of a run, and the epsilons of its epochs."""
    result = training.train(config(out=tmp_path / "run", **changes))
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    return result, [json.loads(line)["epsilon"] for line in lines]


@pytest.mark.parametrize("accountant", ["pld", "rdp", "rdp_classic"])
def test_every_epoch_shows_the_runs_own_accountant(tmp_path, accountant):
    result, shown = trained(tmp_path, epochs=12, accountant=accountant)
    exact = [accounting.epsilon([Event(0.2, 1.0, 5 * e)], DELTA, accountant) for e in range(1, 13)]
    assert shown == exact
    assert shown == sorted(set(shown))  # it rises, every time
    assert shown[-1] == result["epsilon"]


def test_a_run_of_many_epochs_shows_the_next_computed_point(tmp_path, monkeypatch):
    from vestige.privacy import composition

    composed = set()
    original = composition.composed_losses

    def counting(events):
        composed.add(events)
        return original(events)

    monkeypatch.setattr(composition, "composed_losses", counting)
    composition.cached_epsilon.cache_clear()
    result, shown = trained(tmp_path, epochs=100)
    assert len(composed) <= 33
    monkeypatch.undo()
    assert len(shown) == 100 and shown == sorted(shown) and shown[-1] == result["epsilon"]
    for epoch in (1, 2, 3, 4, 50, 51, 97, 98, 100):
        exact = accounting.epsilon([Event(0.2, 1.0, 5 * epoch)], DELTA)
        after = accounting.epsilon([Event(0.2, 1.0, 5 * (-(-epoch // 4) * 4))], DELTA)
        assert exact <= shown[epoch - 1] <= after


@pytest.mark.parametrize("method", ["dp-is", "dp-ftrl", "fractional-noise", "dp-sam", "sma"])
def test_every_method_shows_a_rising_bound_that_ends_at_the_result(tmp_path, method):
    settings = {"bands": 3} if method == "fractional-noise" else {}
    result, shown = trained(tmp_path, epochs=6, method=method, settings=settings)
    assert shown == sorted(shown)
    assert shown[-1] == result["epsilon"]


def test_a_target_is_never_passed_on_the_way(tmp_path):
    result, shown = trained(tmp_path, epochs=3, epsilon=3.0)
    assert shown == sorted(set(shown))
    assert shown[-1] == result["epsilon"] <= 3.0


@pytest.mark.parametrize("epochs", [20, 120])
def test_a_guarded_run_ends_at_its_result(tmp_path, epochs):
    result, shown = trained(tmp_path, epochs=epochs, max_epsilon=5.0)
    assert result["budget_spent"]
    assert shown == sorted(shown)
    assert shown[-1] == result["epsilon"] <= 5.0


def test_a_shared_ledger_is_shown_by_the_same_accountant(tmp_path):
    training.train(config(out=tmp_path / "first", epochs=2, ledger=tmp_path / "shared"))
    result, shown = trained(tmp_path, epochs=2, ledger=tmp_path / "shared")
    exact = [accounting.epsilon([Event(0.2, 1.0, n)], DELTA) for n in (15, 20)]
    assert shown == exact and result["epsilon"] == exact[-1]


@pytest.mark.parametrize("every", [None, 1])
def test_an_interrupted_run_is_resumed_to_the_same_curve(tmp_path, every):
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        part = config(out=tmp_path / "run", epochs=4, checkpoint_every=every)
        stop = lambda p: p.step == 10 and not p.metrics and signal.raise_signal(signal.SIGINT)  # noqa: E731
        result = training.train(part, progress=stop)
    finally:
        signal.signal(signal.SIGINT, before)
    planned = accounting.epsilon([Event(0.2, 1.0, 20)], DELTA)
    assert result["interrupted"] and result["epsilon"] == planned
    again = training.resume(tmp_path / "run")
    shown = [
        json.loads(line)["epsilon"]
        for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert again["epsilon"] == planned == shown[-1]
    assert shown == sorted(shown)


def test_how_often_a_run_is_composed():
    one, two = [Event(0.1, 1.0, 5)], [Event(0.1, 1.0, 5), Event(1.0, 9.0, 2)]
    assert [computed_every(n, one) for n in (1, 32, 33, 64, 65)] == [1, 1, 2, 2, 3]
    assert computed_every(32, two) == 2
    schedule = [Event(0.1, 1 + step / 100) for step in range(200)]
    assert computed_every(10, schedule) == 10  # only the end


def test_a_bound_on_the_way_is_one():
    point = [Event(0.01, 1.0, 40)]
    for count in (1, 3, 10, 39, 40):
        spent = [Event(0.01, 1.0, count)]
        bound = epsilon_on_the_way(spent, point, DELTA)
        assert accounting.epsilon(spent, DELTA) <= bound <= accounting.epsilon(point, DELTA)
        assert bound <= accounting.epsilon(spent, DELTA, "rdp")
