"""A dataset in memory."""

from __future__ import annotations

import torch

from vestige.train.dataset import PLAIN, Dataset


def test_a_dataset_is_for_classification_with_inputs_as_they_are() -> None:
    x = torch.zeros(3, 1, 4, 5)
    data = Dataset("d", x, torch.zeros(3), x, torch.zeros(3), 2)
    assert data.input_shape == (1, 4, 5)
    assert (data.task, data.preprocessing, data.own, data.weights) == (
        "classification",
        PLAIN,
        False,
        None,
    )
