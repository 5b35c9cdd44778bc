"""Constants that bring features to a common scale, from images of a random process.

A linear model learns better where its features are of one size. The size of a data set's own
features would have to be paid for; that of random images costs nothing, and what matters, how much
smaller a second wavelet leaves a feature than a first, is nearly the same. The images are noise
whose amplitude falls as 1 / frequency, as that of photographs does (Field, JOSA A 4, 1987).

Guarantee: the constants are public: no record has a part in them.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_IMAGES, _SEED = 300, 0
_COMMON, _CONTRAST = 0.9, 0.25  # share of the variance that colours have in common; deviation
_GROUPS, _SIZE = 27, 7.0  # with 81 maps; a clip bound of 1 is then small for nearly every record


def random_images(shape: tuple[int, ...], count: int = _IMAGES, seed: int = _SEED) -> Tensor:
    """Images of 1 / f noise, (count, channels, height, width), in [0, 1]; always the same."""
    channels, height, width = shape
    generator = torch.Generator().manual_seed(seed)
    down, across = torch.fft.fftfreq(height), torch.fft.fftfreq(width)
    frequency = (down[:, None].square() + across.square()).sqrt()
    frequency[0, 0] = 1 / max(height, width)

    def noise(maps: int) -> Tensor:
        white = torch.randn(count, maps, height, width, generator=generator)
        coloured: Tensor = torch.fft.ifft2(torch.fft.fft2(white) / frequency).real
        return coloured

    mixed = _COMMON**0.5 * noise(1) + (1 - _COMMON) ** 0.5 * noise(channels)
    images: Tensor = (mixed / mixed.std() * _CONTRAST + 0.5).clamp(0, 1)
    return images


class PublicScale(nn.Module):
    """What `features` made, each channel less its mean and over its deviation on random images.

    The constants are buffers of the model: a saved model has those that it was trained with.
    """

    def __init__(self, features: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        with torch.no_grad():
            seen = torch.cat([features(part) for part in random_images(shape).split(50)])
        self.register_buffer("mean", seen.mean((0, 2, 3), keepdim=True))
        self.register_buffer("deviation", seen.std((0, 2, 3), keepdim=True))

    def forward(self, x: Tensor) -> Tensor:
        """The features on the common scale."""
        return (x - self.get_buffer("mean")) / self.get_buffer("deviation")


class InGroups(nn.Module):
    """Each image's own features in groups of channels, each less its mean and of one deviation."""

    def forward(self, x: Tensor) -> Tensor:
        """The features on the common scale, each row's by itself."""
        return _SIZE * nn.functional.group_norm(x, _GROUPS)
