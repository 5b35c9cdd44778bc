"""Heads on fixed features: what is learned is the head, on features that are computed once.

Guarantee: features are made row by row, so that training on them is training on the rows; they are
as private as the rows, and stay in memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from vestige.train.recipes.public_scale import PublicScale
from vestige.train.recipes.scattering import Scattering

if TYPE_CHECKING:
    from vestige.train.dataset import Dataset

_IMAGES_AT_ONCE = 250


class OnFeatures(nn.Module):
    """A head on fixed features; it takes inputs, or their features where somebody has them.

    `features` has no parameters to train, and `shape` is the shape of an input's features.
    """

    def __init__(self, features: nn.Module, head: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.features, self.head, self.shape = features.eval(), head, shape

    def train(self, mode: bool = True) -> OnFeatures:
        """Only the head has a training mode: fixed features are the same in both."""
        self.training = mode
        self.head.train(mode)
        return self

    def forward(self, x: Tensor) -> Tensor:
        """The scores of inputs, or of features."""
        known = tuple(x.shape[1:]) == self.shape
        scores: Tensor = self.head(x if known else self.features(x))
        return scores


def scatter(shape: tuple[int, ...], classes: int) -> OnFeatures:
    """A linear model on scattering features of two scales, brought to a common scale.

    Tramer and Boneh, arXiv 2011.11660, who normalise by statistics of the data, which cost privacy,
    or in groups in each image, which costs accuracy. Here the constants are public.
    """
    channels, height, width = shape
    made = (81 * channels, height // 4, width // 4)
    head = nn.Sequential(nn.Flatten(), nn.Linear(made[0] * made[1] * made[2], classes))
    waves = Scattering((height, width))
    return OnFeatures(nn.Sequential(waves, PublicScale(waves, shape)), head, made)


def with_features(
    dataset: Dataset, model: nn.Module, device: str, tell: Callable[[float], None]
) -> Dataset:
    """The dataset with the features that a model learns from; unchanged for any other model.

    `tell` hears the share that is done. Features that are there already are taken for the model's.
    """
    if not isinstance(model, OnFeatures) or dataset.features is not None:
        return dataset
    splits = dataset.x_train, dataset.x_test
    made = [torch.empty(len(inputs), *model.shape, device=device) for inputs in splits]
    done, total = 0, sum(map(len, splits))
    for inputs, out in zip(splits, made, strict=True):
        for start in range(0, len(inputs), _IMAGES_AT_ONCE):
            rows = slice(start, start + _IMAGES_AT_ONCE)
            with torch.no_grad():
                out[rows] = model.features(inputs[rows].to(device))
            done += len(inputs[rows])
            tell(done / total)
    return replace(dataset, features=(made[0], made[1]))
