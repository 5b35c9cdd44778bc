"""WRN-16-4 as private training likes it: weights standardised, ReLU before GroupNorm.

Zagoruyko and Komodakis, arXiv 1605.07146; without BatchNorm and with standardised weights De et
al., arXiv 2204.13650, whose results others have repeated; the order of ReLU and norm is that of
Sander et al., arXiv 2210.03403. No layer couples the examples of a batch.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

_GROUPS = 16


class StandardConv(nn.Conv2d):
    """A convolution whose kernels are brought to mean 0 and variance 1 / (their inputs)."""

    def forward(self, x: Tensor) -> Tensor:
        """The maps of a batch."""
        kernels = self.weight.flatten(1)
        mean, inputs = kernels.mean(1, keepdim=True), kernels.shape[1]
        variance = kernels.var(1, keepdim=True, correction=0)
        scaled = (kernels - mean) * (variance * inputs + 1e-4).rsqrt()
        weight = scaled.view_as(self.weight)
        return F.conv2d(x, weight, self.bias, self.stride, self.padding)


class WideBlock(nn.Module):
    """Two standardised convolutions behind ReLU and GroupNorm, and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(_GROUPS, inputs)
        self.conv1 = StandardConv(inputs, outputs, 3, stride, padding=1)
        self.norm2 = nn.GroupNorm(_GROUPS, outputs)
        self.conv2 = StandardConv(outputs, outputs, 3, padding=1)
        self.norm: nn.Module = nn.Identity()
        self.shortcut: nn.Module = nn.Identity()
        self.wider = inputs != outputs
        if self.wider:
            self.norm = nn.GroupNorm(_GROUPS, inputs)
            self.shortcut = StandardConv(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        """The block's output for a batch of maps."""
        inner = self.conv1(self.norm1(F.relu(x)))
        inner = self.conv2(self.norm2(F.relu(inner)))
        beside = self.shortcut(F.relu(self.norm(x))) if self.wider else x
        out: Tensor = beside + inner
        return out


def wide_resnet(shape: tuple[int, ...], classes: int, blocks: int = 2, width: int = 4) -> nn.Module:
    """WRN-16-4 for small images: 2,751,562 parameters on CIFAR-10."""
    sizes = [16 * width, 32 * width, 64 * width]
    layers: list[nn.Module] = [StandardConv(shape[0], _GROUPS, 3, padding=1)]
    inputs = _GROUPS
    for level, outputs in enumerate(sizes):
        for block in range(blocks):
            layers.append(WideBlock(inputs, outputs, 2 if level and not block else 1))
            inputs = outputs
    layers += [nn.ReLU(), nn.GroupNorm(_GROUPS, inputs), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(inputs, classes))
