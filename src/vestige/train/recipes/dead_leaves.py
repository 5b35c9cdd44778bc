"""Images of a random process, and two views of each: what features are learned from without data.

A dead-leaves image is covered by shapes that lie on each other, of sizes that fall as a power law
(Lee, Mumford and Huang, IJCV 41, 2001). Networks that have learned to tell such images apart see
edges, corners and textures in photographs too (Baradad et al., arXiv 2106.05963). Here a shape is
a turned superellipse with a colour, a shade, stripes and 1 / f noise of its own.

Guarantee: the images are a function of their seed, and no record has a part in them.
"""

from __future__ import annotations

import functools
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.train.recipes.public_scale import random_images

_LEAVES, _TEXTURES = 40, 256
_LEAST, _MOST = 0.08, 0.7  # radius of a leaf, in sides of the image
_COMMON = 0.7  # share of the variance that the colours of a leaf have in common


def dead_leaves(count: int, side: int, seed: int, device: str = "cpu") -> Tensor:
    """(count, 3, side, side) in [0, 1]; every machine draws the same numbers for a seed."""
    draw = _Drawing(seed, device)
    axis = (torch.arange(side, device=device) + 0.5) / side
    down, across = axis.view(1, side, 1), axis.view(1, 1, side)
    textures = _textures(side, device)
    images = draw.colours(count).expand(-1, -1, side, side)
    for _ in range(_LEAVES):
        turn, place = draw.uniform(count, 1) * 2 * math.pi, draw.uniform(count, 2) * 1.2 - 0.1
        # The area of leaves is shared out evenly over sizes: density radius^-3.
        spread = draw.uniform(count, 1)
        radius = (spread * _LEAST**-2 + (1 - spread) * _MOST**-2).rsqrt()
        thin = 0.3 + 0.7 * draw.uniform(count, 1)
        power = 2 ** (3 * draw.uniform(count, 1))  # from a diamond by an ellipse to a rectangle
        x, y = across - place[:, :1, None], down - place[:, 1:, None]
        along = x * turn.cos()[..., None] + y * turn.sin()[..., None]
        aside = y * turn.cos()[..., None] - x * turn.sin()[..., None]
        u, v = along / radius[..., None], aside / (radius * thin)[..., None]
        edge = (u.abs() ** power[..., None] + v.abs() ** power[..., None] + 1e-9) ** (
            1 / power[..., None]
        )
        cover = ((1 - edge) * (radius * thin)[..., None] * side + 0.5).clamp(0, 1)
        waves = 2 ** (1 + draw.uniform(count, 1) * math.log2(side / 6))  # in a side of the image
        phase = 2 * math.pi * (waves[..., None] * along + draw.uniform(count, 1)[..., None])
        lines = draw.sparse(count) * phase.sin()[:, None] + draw.sparse(count) * u[:, None]
        grain = draw.sparse(count, 1) * textures[draw.whole(count, _TEXTURES)]
        cover = cover[:, None]
        images = images + cover * (draw.colours(count) + lines + 4 * grain - images)
    return images.clamp(0, 1)


def two_views(images: Tensor, side: int, seed: int) -> Tensor:
    """(2 x rows, 3, side, side): two random crops of each image, mirrored and coloured anew."""
    draw = _Drawing(seed, str(images.device))
    both = torch.cat([images, images])
    rows = len(both)
    share = (0.15 + 0.85 * draw.uniform(rows, 1)).sqrt()  # of the image's side
    stretch = 2 ** (0.4 * (2 * draw.uniform(rows, 1) - 1))
    size = torch.cat([share * stretch, share / stretch], 1).clamp(max=1)
    move = (2 * draw.uniform(rows, 2) - 1) * (1 - size)
    mirror = torch.cat([2 * draw.whole(rows, 2)[:, None] - 1, torch.ones_like(share)], 1)
    grid = torch.cat([torch.diag_embed(size * mirror), move[..., None]], 2)
    field = F.affine_grid(grid, [rows, 3, side, side], align_corners=False)
    seen = F.grid_sample(both, field, padding_mode="reflection", align_corners=False)
    grey = seen.mean(1, keepdim=True)
    colour = 1.6 * draw.uniform(rows, 1, 1, 1)
    colour = colour * (draw.uniform(rows, 1, 1, 1) > 0.2)  # some lose it altogether
    light, contrast = draw.uniform(rows, 1, 1, 1), draw.uniform(rows, 1, 1, 1)
    tint = 0.1 * (2 * draw.uniform(rows, 3, 1, 1) - 1)
    seen = grey + colour * (seen - grey)
    middle = grey.mean((2, 3), keepdim=True)
    return ((0.5 + contrast) * (seen - middle) + middle + 0.6 * light - 0.3 + tint).clamp(0, 1)


class _Drawing:
    """Random numbers of a seed, made on the CPU, so that every device has the same."""

    def __init__(self, seed: int, device: str) -> None:
        self._generator, self._device = torch.Generator().manual_seed(seed), device

    def uniform(self, *shape: int) -> Tensor:
        """Numbers from 0 to 1."""
        return torch.rand(shape, generator=self._generator).to(self._device)

    def whole(self, count: int, below: int) -> Tensor:
        """Whole numbers from 0 on."""
        return torch.randint(below, (count,), generator=self._generator).to(self._device)

    def _normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(self._device)

    def colours(self, count: int) -> Tensor:
        """(count, 3, 1, 1): grey more than coloured."""
        own, grey = self._normal(count, 3), self._normal(count, 1)
        mixed: Tensor = _COMMON**0.5 * grey + (1 - _COMMON) ** 0.5 * own
        return (0.5 + 0.25 * mixed)[..., None, None]

    def sparse(self, count: int, channels: int = 3) -> Tensor:
        """(count, channels, 1, 1): small contrasts, none for half of the leaves."""
        present = (self.uniform(count, 1) > 0.5) * self.uniform(count, 1)
        values: Tensor = 0.3 * present * self._normal(count, channels)
        return values[..., None, None]


@functools.lru_cache(maxsize=2)
def _textures(side: int, device: str) -> Tensor:
    return random_images((3, side, side), _TEXTURES, seed=1).to(device) - 0.5
