"""The loop: metrics, progress, lots in pieces, interrupts."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.training import (
    LINE,
    RESULT,
    lines,
    press_at,
    tiny,
    weights,
)
from vestige.gradients.graphs import Graph
from vestige.train import data, models
from vestige.train.training import Progress, prepare, train

pytestmark = pytest.mark.usefixtures("empty_folder")


def test_the_weights_are_the_model_that_was_measured() -> None:
    result = train(tiny(steps=20))
    model = models.build("linear", (1, 8, 8), 10)
    model.load_state_dict(weights(result))
    test = data.load("digits", train_size=40, test_size=20)
    with torch.no_grad():
        scores = model(test.x_test)
    assert result["accuracy"] == (scores.argmax(1) == test.y_test).double().mean().item()
    loss = torch.nn.functional.cross_entropy(scores, test.y_test).item()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)


def test_a_loss_that_is_not_finite_is_null() -> None:
    result = train(tiny(noise_multiplier=1e30, lr=1e30))
    assert result["loss"] is None
    assert lines(result)[-1]["test_loss"] is None


def test_a_compiled_run_has_the_weights_and_epsilon_of_the_plain_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    real, rows = Graph.__call__, []

    def noted(self: Graph, *inputs: Any) -> Any:
        rows.append(self._capture.rows)
        return real(self, *inputs)

    monkeypatch.setattr(Graph, "__call__", noted)
    plain, fast = (train(tiny(noise_seed=3, steps=6, compile=c)) for c in (False, True))
    assert len(rows) > 4
    assert fast["epsilon"] == plain["epsilon"]
    for name, weight in weights(plain).items():
        torch.testing.assert_close(weights(fast)[name], weight, rtol=1e-4, atol=1e-6)


def test_the_training_loss_is_written_on_request_only_and_marked() -> None:
    key = "train_loss_outside_guarantee"
    result = train(tiny(train_loss=True))
    assert set(result) == RESULT.keys() | {key}
    assert all(set(line) == LINE | {key} for line in lines(result))
    assert any("outside the guarantee" in caveat for caveat in result["caveats"])
    model = models.build("linear", (1, 8, 8), 10)
    model.load_state_dict(weights(result))
    split = data.load("digits", train_size=40, test_size=20)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(split.x_train), split.y_train).item()
    assert result[key] == pytest.approx(loss, rel=1e-5)


def test_a_noise_seed_asks_for_repeatable_convolutions_while_it_trains() -> None:
    seen: list[bool] = []
    for noise_seed in (1, None):
        config = tiny(noise_seed=noise_seed, steps=1)
        train(config, progress=lambda p: seen.append(torch.backends.cudnn.deterministic))
    assert seen == [False, False, True, True, True] + [False] * 5
    assert not torch.backends.cudnn.deterministic


def test_the_loop_writes_nothing_and_yields_every_lot_and_epoch(tmp_path: Path) -> None:
    made = prepare(tiny())
    with made.settled():
        told = list(made.lots())
    assert [p.step for p in told if p.metrics is None] == list(range(8))
    assert [p.metrics["step"] for p in told if p.metrics] == [5, 7]
    result = made.result()
    assert set(result) == set(RESULT)
    assert (result["steps"], result["interrupted"], result["folder"]) == (7, False, "")
    assert not list(tmp_path.iterdir())


def test_the_loop_ends_after_the_lot_at_which_it_is_asked_to() -> None:
    made = prepare(tiny(steps=100))
    with made.settled():
        told = list(made.lots(lambda: made.engine.released == 3))
    assert [(p.step, p.metrics is not None) for p in told[-2:]] == [(3, False), (3, True)]
    assert made.result()["interrupted"] is True


def test_ctrl_c_before_the_first_lot_reports_nothing_spent() -> None:
    result = train(tiny(), progress=press_at(0))
    assert (result["interrupted"], result["steps"], result["epsilon"]) == (True, 0, 0.0)


def test_ctrl_c_on_the_last_lot_is_no_interrupt() -> None:
    result = train(tiny(), progress=press_at(7))
    assert result["interrupted"] is False


def test_training_works_outside_the_main_thread() -> None:
    results: list[dict[str, Any]] = []
    thread = threading.Thread(target=lambda: results.append(train(tiny())))
    thread.start()
    thread.join()
    assert results[0]["steps"] == 7


def test_progress_tells_stages_lots_and_epochs() -> None:
    told: list[Progress] = []
    result = train(tiny(), progress=told.append)
    stages = list(dict.fromkeys(p.stage for p in told))
    assert stages == ["loading digits", "accounting", "training"]
    assert [p.metrics for p in told if p.metrics] == lines(result)
    assert {(p.steps, p.epochs) for p in told if p.stage == "training"} == {(7, 2)}
