"""The audit's own model and data: records whose gradients are worst cases for every clip bound.

    loss of record i = weight_i * sum over layers l of  k * W_l[i]

The loss is linear, so the gradient of record i is the same at all weights: k in the i-th number of
every layer and zero elsewhere, with k far beyond every bound. Clipped, record i contributes exactly
the bound of each group, in coordinates that no other record touches. Layers are matrices, so that
methods that look at spectra have something to look at.

Number 0 belongs to nobody: an empty lot is a row of zeros.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

SATURATION = 1e4  # k over the bound C: quantile clipping may raise the bound during the run


class CanaryModel(nn.Module):
    """`layers` matrices with a number for every canary in each."""

    def __init__(self, canaries: int, layers: int) -> None:
        super().__init__()
        self.columns = math.isqrt(canaries) + 1
        rows = -(-(canaries + 1) // self.columns)
        made = [nn.Embedding(rows, self.columns) for _ in range(layers)]
        generator = torch.Generator().manual_seed(0)  # public
        for layer in made:
            with torch.no_grad():
                layer.weight.normal_(std=0.1, generator=generator)
        self.layers = nn.ModuleList(made)

    def forward(self, numbers: Tensor) -> Tensor:
        """The sum over the layers of each record's own number."""
        row, column = numbers // self.columns, (numbers % self.columns).unsqueeze(1)
        return sum((layer(row).gather(1, column).squeeze(1) for layer in self.layers), _zero)


_zero = torch.zeros(())


@dataclass(frozen=True)
class Canaries:
    """Who is in the data: a fair coin for each canary, known to the auditor.

    With `zeroed` all of them are in the data and those that are out have weight zero: the adjacency
    of methods with a fixed order.
    """

    member: npt.NDArray[np.bool_]
    zeroed: bool = False

    @classmethod
    def tossed(cls, count: int, coins: np.random.Generator, zeroed: bool) -> Canaries:
        """A fair coin for each of `count` canaries."""
        return cls(coins.random(count) < 0.5, zeroed)

    @property
    def count(self) -> int:
        """The number of canaries, in or out."""
        return len(self.member)

    def dataset(self) -> TensorDataset:
        """Numbers (from 1 on) and weights of the records."""
        numbers = torch.arange(1, self.count + 1)
        weights = torch.from_numpy(self.member.astype(np.float32))
        if self.zeroed:
            return TensorDataset(numbers, weights)
        chosen = torch.from_numpy(self.member)
        return TensorDataset(numbers[chosen], weights[chosen])
