"""Figures beyond accuracy."""

from __future__ import annotations

import pytest
import torch

from vestige.train.dataset import Dataset
from vestige.train.metrics import measured


def made(task: str, y: torch.Tensor, classes: int = 2, **more: object) -> Dataset:
    x = torch.zeros(len(y), 1)
    return Dataset("d", x, y, x, y, classes, task=task, **more)  # type: ignore[arg-type]


def test_a_model_that_says_the_majority_has_no_balanced_accuracy_above_one_half() -> None:
    data = made("classification", torch.tensor([0] * 39 + [1]))
    found = measured(data, torch.tensor([[1.0, 0.0]]).repeat(40, 1))
    assert found["balanced_accuracy"] == 0.5
    assert found["auc"] == 0.5
    assert found["confusion_matrix"] == [[39, 0], [1, 0]]


def test_figures_of_several_classes() -> None:
    data = made("classification", torch.tensor([0, 1, 2, 2]), classes=3)
    found = measured(data, 5 * torch.eye(3)[[0, 1, 2, 1]])
    assert found["balanced_accuracy"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert 0.5 < found["auc"] < 1
    absent = made("classification", torch.tensor([0, 1]), classes=3)
    assert measured(absent, torch.eye(3)[[0, 1]])["auc"] is None


def test_figures_of_labels_and_numbers() -> None:
    labels = made("multi-label", torch.tensor([[0.0, 1], [1, 1], [0, 1]]))
    found = measured(labels, torch.tensor([[-1.0, 1], [2, 1], [-3, -1]]))
    assert found == {"all_labels_right": pytest.approx(2 / 3), "auc": 1, "auc_by_label": [1, None]}
    numbers = made("regression", torch.tensor([[0.0], [1.0]]), 1, ranges=((0.0, 20.0),))
    found = measured(numbers, torch.tensor([[0.5], [4.0]]))
    assert found == pytest.approx({"rmse": (25 / 2) ** 0.5, "mae": 2.5})


def test_scores_that_are_not_finite_have_no_figures() -> None:
    data = made("classification", torch.tensor([0, 1]))
    assert measured(data, torch.full((2, 2), torch.nan)) == {}
