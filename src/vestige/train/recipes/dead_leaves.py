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
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from vestige.train.recipes.public_scale import random_images

_LEAVES, _TEXTURES = 40, 256
_DRAWN = 16  # numbers of each kind, for a leaf or a view
_LEAST, _MOST = 0.08, 0.7  # radius of a leaf, in sides of the image
_COMMON = 0.7  # share of the variance that the colours of a leaf have in common


def dead_leaves(count: int, side: int, seed: int, device: str = "cpu") -> Tensor:
    """(count, 3, side, side) in [0, 1]; every machine draws the same numbers for a seed."""
    axis = (torch.arange(side, device=device) + 0.5) / side
    down, across = axis.view(1, side, 1), axis.view(1, 1, side)
    textures = _textures(side, device)
    ground, *leaves = _drawings(1 + _LEAVES, count, seed, device)
    images = ground.colour().expand(-1, -1, side, side)
    for leaf in leaves:
        x = across - 1.2 * leaf.uniform() + 0.1
        y = down - 1.2 * leaf.uniform() + 0.1
        turn = 2 * math.pi * leaf.uniform()
        along, aside = x * turn.cos() + y * turn.sin(), y * turn.cos() - x * turn.sin()
        # The area of leaves is shared out evenly over sizes: density radius^-3.
        spread = leaf.uniform()
        long = (spread * _LEAST**-2 + (1 - spread) * _MOST**-2).rsqrt()
        short = long * (0.3 + 0.7 * leaf.uniform())
        power = 2 ** (3 * leaf.uniform())  # from a diamond by an ellipse to a rectangle
        u, v = along / long, aside / short
        edge = (u.abs() ** power + v.abs() ** power + 1e-9) ** (1 / power)
        cover = ((1 - edge) * short * side + 0.5).clamp(0, 1)[:, None]
        waves = 2 ** (1 + leaf.uniform() * math.log2(side / 6))  # in a side of the image
        stripes = (2 * math.pi * (waves * along + leaf.uniform())).sin()[:, None]
        which = (leaf.uniform() * _TEXTURES).long().flatten()
        surface = leaf.colour() + leaf.contrast() * stripes + leaf.contrast() * u[:, None]
        surface = surface + 4 * leaf.contrast(1) * textures[which]
        images = images + cover * (surface - images)
    return images.clamp(0, 1)


def two_views(images: Tensor, side: int, seed: int) -> Tensor:
    """(2 x rows, 3, side, side): two random crops of each image, mirrored and coloured anew."""
    both = torch.cat([images, images])
    (draw,) = _drawings(1, len(both), seed, str(images.device))
    share = (0.15 + 0.85 * draw.uniform()).sqrt()  # of the image's side
    stretch = 2 ** (0.4 * (2 * draw.uniform() - 1))
    wide, high = (share * stretch).clamp(max=1), (share / stretch).clamp(max=1)
    mirror, zero = 1 - 2 * (draw.uniform() > 0.5).float(), torch.zeros_like(share)
    right, down = ((2 * draw.uniform() - 1) * (1 - size) for size in (wide, high))
    across = torch.cat([wide * mirror, zero, right], 2)
    grid = torch.cat([across, torch.cat([zero, high, down], 2)], 1)
    field = F.affine_grid(grid, [len(both), 3, side, side], align_corners=False)
    seen = F.grid_sample(both, field, padding_mode="reflection", align_corners=False)
    grey = seen.mean(1, keepdim=True)
    middle = grey.mean((2, 3), keepdim=True)
    colour = 1.6 * draw.uniform() * (draw.uniform() > 0.2)  # some lose it altogether
    contrast, light = 0.5 + draw.uniform(), 0.6 * draw.uniform() - 0.3
    tint = torch.cat([0.2 * draw.uniform() - 0.1 for _ in range(3)], 1)
    seen = grey - middle + colour[..., None] * (seen - grey)
    return (contrast[..., None] * seen + middle + (light + tint)[..., None]).clamp(0, 1)


class _Drawing:
    """Random numbers of each image, handed out one after the other."""

    def __init__(self, uniform: Tensor, normal: Tensor) -> None:
        self._uniform: Iterator[Tensor] = iter(uniform)
        self._normal: Iterator[Tensor] = iter(normal)

    def uniform(self) -> Tensor:
        """(count, 1, 1), from 0 to 1."""
        return next(self._uniform)

    def normal(self, channels: int) -> Tensor:
        """(count, channels, 1, 1)."""
        return torch.stack([next(self._normal) for _ in range(channels)], 1)

    def colour(self) -> Tensor:
        """(count, 3, 1, 1): grey more than coloured."""
        mixed: Tensor = _COMMON**0.5 * self.normal(1) + (1 - _COMMON) ** 0.5 * self.normal(3)
        return 0.5 + 0.25 * mixed

    def contrast(self, channels: int = 3) -> Tensor:
        """(count, channels, 1, 1): small ones, none for half of the leaves."""
        size: Tensor = 0.3 * (self.uniform() > 0.5) * self.uniform()
        return size[..., None] * self.normal(channels)


def _drawings(times: int, count: int, seed: int, device: str) -> list[_Drawing]:
    """Drawn on the CPU, so that every device has the same, and moved at once."""
    generator = torch.Generator().manual_seed(seed)
    shape = (times, _DRAWN, count, 1, 1)
    uniform = torch.rand(shape, generator=generator).to(device)
    normal = torch.randn(shape, generator=generator).to(device)
    return [_Drawing(*both) for both in zip(uniform, normal, strict=True)]


@functools.lru_cache(maxsize=2)
def _textures(side: int, device: str) -> Tensor:
    return random_images((3, side, side), _TEXTURES, seed=1).to(device) - 0.5
