"""Frozen features for `vestige train --features`: a module that turns each input into a row.

    vestige train --recipe probe --features examples.frozen_features:random_convolutions --epsilon 3

A factory gets the shape of an input and returns a module whose rows do not touch each other in
evaluation mode. Weights that were learned from other, public data are better than random ones:

    def pretrained(shape):
        return timm.create_model("resnet18", pretrained=True, num_classes=0)

Guarantee: epsilon is about the records that the head is trained on. Records that the features were
learned from are outside of it, so features that were learned from the same private records take it
away, and nothing here can notice that. Random filters were learned from nothing.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class RandomConvolutions(nn.Module):
    """Random filters, a ReLU, and means over a coarse grid: nothing was learned from anything."""

    def __init__(self, channels: int, side: int) -> None:
        super().__init__()
        self.filters = nn.Conv2d(channels, 32, 5, padding=2, bias=False)
        with torch.no_grad():
            kernels = self.filters.weight
            kernels -= kernels.mean((1, 2, 3), keepdim=True)
        self.grid = nn.AdaptiveAvgPool2d(4 if side > 16 else 2)

    def forward(self, x: Tensor) -> Tensor:
        """(rows, channels, height, width) to (rows, features)."""
        means: Tensor = self.grid(self.filters(x).relu()).flatten(1)
        return means


def random_convolutions(shape: tuple[int, ...]) -> nn.Module:
    """32 random filters: 128 features of digits, 512 of MNIST."""
    return RandomConvolutions(shape[0], shape[1])
