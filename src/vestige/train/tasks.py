"""What a model is trained to predict: the loss of every record, and how right it is.

Guarantee: both are functions of one record and its scores; weights of classes are public.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.train.dataset import Dataset


def losses(dataset: Dataset, scores: Tensor, y: Tensor) -> Tensor:
    """The loss of each record: one axis."""
    if dataset.task == "multi-label":
        return F.binary_cross_entropy_with_logits(scores, y, reduction="none").mean(1)
    if dataset.task == "regression":
        return F.mse_loss(scores, y, reduction="none").mean(1)
    weight = None if dataset.weights is None else scores.new_tensor(dataset.weights)
    return F.cross_entropy(scores, y, weight=weight, reduction="none")


def hits(dataset: Dataset, scores: Tensor, y: Tensor) -> Tensor:
    """How right each prediction is, from 0 to 1.

    Classification: whether the class is. Multi-label: the share of labels that are. Regression: 1
    minus half of the absolute error of the scaled targets, which lie from -1 to 1.
    """
    if dataset.task == "multi-label":
        return ((scores > 0) == (y > 0.5)).double().mean(1)
    if dataset.task == "regression":
        return 1 - (scores.clamp(-1, 1) - y.clamp(-1, 1)).abs().double().mean(1) / 2
    return (scores.argmax(1) == y).double()


def from_hits(dataset: Dataset, share: float) -> dict[str, float]:
    """The figure that a mean of `hits` stands for: accuracy, or the absolute error in the unit."""
    if dataset.task != "regression":
        return {"accuracy": share}
    return {"mae": unit(dataset) * 2 * (1 - share)}


def unit(dataset: Dataset) -> float:
    """What 1 of a scaled target is in the target's own unit; 1 where there are several."""
    if len(dataset.ranges) != 1:
        return 1.0
    low, high = dataset.ranges[0]
    return (high - low) / 2


def scores_of(model: torch.nn.Module, x: Tensor, rows: int) -> Tensor:
    """The model's scores, some rows at a time; the model is in evaluation mode meanwhile."""
    training = model.training
    model.eval()
    with torch.no_grad():
        scores = torch.cat([model(part) for part in x.split(rows)])
    model.train(training)
    return scores


def evaluated(
    dataset: Dataset, model: torch.nn.Module, split: tuple[Tensor, Tensor], rows: int
) -> tuple[float, float]:
    """Mean loss and mean of `hits` over a split, some rows at a time."""
    loss = right = 0.0
    for x, y in zip(*(values.split(rows) for values in split), strict=True):
        scores = scores_of(model, x, rows)
        loss += float(losses(dataset, scores, y).sum())
        right += float(hits(dataset, scores, y).sum())
    return loss / len(split[0]), right / len(split[0])
