"""Losses and hits of each task: one number for each record, by itself."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import cross_entropy

from vestige.train import tasks
from vestige.train.dataset import Dataset


def made(task: str, y: torch.Tensor, **more: object) -> Dataset:
    x = torch.zeros(len(y), 3)
    return Dataset("d", x, y, x, y, 2, task=task, **more)  # type: ignore[arg-type]


CLASSES = made("classification", torch.tensor([0, 1, 1, 0]))
LABELS = made("multi-label", torch.tensor([[0.0, 1], [1, 1], [0, 0], [1, 0]]))
NUMBERS = made("regression", torch.tensor([[0.5], [-1], [1], [0]]), ranges=((0.0, 40.0),))
SCORES = {
    "classification": torch.tensor([[2.0, 1], [0, 3], [1, 0], [0, 1]]),
    "multi-label": torch.tensor([[-1.0, 2], [3, -1], [-2, -2], [1, 1]]),
    "regression": torch.tensor([[0.5], [1.0], [7.0], [-0.5]]),
}


@pytest.mark.parametrize("data", [CLASSES, LABELS, NUMBERS], ids=lambda d: d.task)
def test_the_loss_of_a_record_is_its_own(data: Dataset) -> None:
    scores = SCORES[data.task]
    whole = tasks.losses(data, scores, data.y_test)
    assert whole.shape == (4,)
    for row in range(4):
        alone = tasks.losses(data, scores[row : row + 1], data.y_test[row : row + 1])
        assert float(alone) == pytest.approx(float(whole[row]))
    hits = tasks.hits(data, scores, data.y_test)
    assert hits.shape == (4,) and bool(((hits >= 0) & (hits <= 1)).all())


def test_hits_are_what_they_say() -> None:
    assert tasks.hits(CLASSES, SCORES["classification"], CLASSES.y_test).tolist() == [1, 1, 0, 0]
    assert tasks.hits(LABELS, SCORES["multi-label"], LABELS.y_test).tolist() == [1, 0.5, 1, 0.5]
    found = tasks.hits(NUMBERS, SCORES["regression"], NUMBERS.y_test)
    assert found.tolist() == [1, 0, 1, 0.75]  # 7 counts as 1, the end of the range
    # Errors of 0, 2, 0 and 1/2 in a scale of which 1 is 20 of the target's unit.
    error = 20 * 2.5 / 4
    assert tasks.from_hits(NUMBERS, float(found.mean())) == pytest.approx({"mae": error})
    assert tasks.from_hits(CLASSES, 0.5) == {"accuracy": 0.5}


def test_class_weights_scale_the_loss_of_each_record() -> None:
    weighted = made("classification", CLASSES.y_test, weights=(0.5, 3.0))
    scores = SCORES["classification"]
    plain = cross_entropy(scores, CLASSES.y_test, reduction="none")
    expected = plain * torch.tensor([0.5, 3, 3, 0.5])
    torch.testing.assert_close(tasks.losses(weighted, scores, CLASSES.y_test), expected)


def test_scores_come_in_evaluation_mode_and_leave_the_mode_as_it_was() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Dropout(0.9))
    x = torch.randn(10, 3)
    first, second = (tasks.scores_of(model, x, 4) for _ in range(2))
    assert torch.equal(first, second) and model.training
    loss, right = tasks.evaluated(CLASSES, model, (x[:4], CLASSES.y_test), 3)
    scores = tasks.scores_of(model, x[:4], 4)
    assert loss == pytest.approx(float(cross_entropy(scores, CLASSES.y_test)))
    assert right == float((scores.argmax(1) == CLASSES.y_test).double().mean())
