"""Scattering: fixed features of images, from wavelets and moduli, with nothing to learn.

    S0 = x * phi,   S1 = |x * psi_1| * phi,   S2 = ||x * psi_1| * psi_2| * phi

psi are Morlet wavelets at J scales and L angles, phi is a Gaussian of scale 2^J, and every S is
read on a grid of step 2^J (Bruna and Mallat, arXiv 1203.1513; with privacy Tramer and Boneh, arXiv
2011.11660, who found linear models on them ahead of networks that learn their features). Filters
and conventions are kymatio's, against which the tests hold them.

Guarantee: a row's features are a function of that row alone, so they cost no privacy; they are as
private as the row.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from vestige.errors import ConfigError

_ANGLES = 8
_WIDTH, _FREQUENCY = 0.8, 3 * math.pi / 4  # of the finest wavelet


class Scattering(nn.Module):
    """(rows, channels, height, width) -> (rows, channels * K, height / 2^scales, width / 2^scales).

    K is 81 at two scales: 1 + 16 + 64. `size` is (height, width), multiples of 2^scales.
    """

    def __init__(self, size: tuple[int, int], scales: int = 2) -> None:
        super().__init__()
        step = 1 << scales
        if scales < 1 or any(side < step or side % step for side in size):
            raise ConfigError(
                f"size={size} must be multiples of 2^{scales}={step}, the step of the features' "
                "grid: pad or crop the images."
            )
        self.scales, self.size = scales, size
        padded = tuple((side // step + 2) * step for side in size)
        self._pad = [(wide - side) // 2 for wide, side in zip(padded, size, strict=True)]
        for scale in range(scales):
            turns = [(_ANGLES // 2 - 1 - k) * math.pi / _ANGLES for k in range(_ANGLES)]
            waves = torch.stack([_morlet(padded, scale, turn) for turn in turns])
            spectra = torch.fft.fft2(waves).real
            for level in range(scale + 1):
                coarse = _coarser(_without_high(spectra, level), 2**level) * 4**level
                self.register_buffer(f"wave{scale}_{level}", coarse.float(), persistent=False)
        for level in range(scales):
            for axis, side in enumerate(padded):
                average = self._average(side, axis, level).float()
                self.register_buffer(f"average{axis}_{level}", average, persistent=False)

    def _average(self, side: int, axis: int, level: int) -> Tensor:
        """The matrix that averages one axis of grid `level` by phi and reads it on the last grid.

        phi is a product of two Gaussians, one for each axis.
        """
        width = _WIDTH * 2 ** (self.scales - 1)
        places = torch.arange(-2 * side, 3 * side, dtype=torch.float64)
        bump = torch.exp(-places.square() / (2 * width**2)).view(5, side).sum(0)
        spectrum = torch.fft.fft(bump / (math.sqrt(2 * math.pi) * width)).real
        spectrum = _without_high(spectrum, level, axes=(-1,)).view(2**level, -1).sum(0)
        shifted = torch.fft.fft(torch.eye(len(spectrum), dtype=torch.float64), dim=0)
        every = torch.fft.ifft(spectrum[:, None] * shifted, dim=0).real
        step = 1 << (self.scales - level)
        first = self._pad[axis] >> self.scales
        average: Tensor = every[::step][first : first + (self.size[axis] >> self.scales)]
        return average

    def forward(self, images: Tensor) -> Tensor:
        """The features of every image."""
        if images.is_cuda:
            return self._features(images)
        # On a CPU what one image becomes on the way fits into a cache, and many images do not.
        return torch.cat([self._features(image) for image in images.split(1)])

    def _features(self, images: Tensor) -> Tensor:
        high, wide = self._pad
        rows = len(images)
        x = nn.functional.pad(images, (wide, wide, high, high), mode="reflect").flatten(0, 1)
        features, spectrum = [self._averaged(x, 0)[:, None]], torch.fft.fft2(x)
        pairs: list[Tensor] = []
        for first in range(self.scales):
            once = self._moduli(spectrum, first, 0)
            features.append(self._averaged(once, first))
            again = torch.fft.fft2(once) if first + 1 < self.scales else once
            twice = [
                self._averaged(self._moduli(again, second, first), second)
                for second in range(first + 1, self.scales)
            ]
            pairs += [torch.cat(twice, dim=2).flatten(1, 2)] if twice else []
        everything = torch.cat(features + pairs, dim=1)
        return everything.view(rows, -1, *everything.shape[2:])

    def _moduli(self, spectrum: Tensor, scale: int, level: int) -> Tensor:
        """|x * psi| for the waves of `scale`, of spectra on grid `level`, read on grid `scale`."""
        waves, step = self.get_buffer(f"wave{scale}_{level}"), 1 << (scale - level)
        height, width = (side // step for side in spectrum.shape[-2:])
        folded = None
        for down in range(step):
            for across in range(step):
                at = (
                    ...,
                    slice(down * height, (down + 1) * height),
                    slice(across * width, (across + 1) * width),
                )
                part = spectrum[at][..., None, :, :] * waves[at]
                folded = part if folded is None else folded.add_(part)
        assert folded is not None
        found = torch.fft.ifft2(folded)
        # Twice as fast on a CPU as torch's modulus of complex numbers.
        moduli: Tensor = torch.addcmul(found.real.square(), found.imag, found.imag).sqrt()
        return moduli / step**2

    def _averaged(self, values: Tensor, level: int) -> Tensor:
        high, wide = (self.get_buffer(f"average{axis}_{level}") for axis in (0, 1))
        return high @ values @ wide.T


def _gabor(
    size: tuple[int, ...], width: float, turn: float, frequency: float, slant: float
) -> Tensor:
    """A complex wave under a Gaussian, made periodic: frequency 0 is the Gaussian alone."""
    across = [torch.arange(-2 * n, 3 * n, dtype=torch.float64) for n in size]
    u, v = torch.meshgrid(*across, indexing="ij")
    along, aside = math.cos(turn) * u + math.sin(turn) * v, math.cos(turn) * v - math.sin(turn) * u
    envelope = torch.exp(-(along.square() + slant**2 * aside.square()) / (2 * width**2))
    wave = torch.polar(envelope, frequency * along)
    folded = wave.view(5, size[0], 5, size[1]).sum((0, 2))
    return folded * (slant / (2 * math.pi * width**2))


def _morlet(size: tuple[int, ...], scale: int, turn: float) -> Tensor:
    """A Gabor wave less a Gaussian, so that its mean is zero."""
    width, frequency, slant = _WIDTH * 2**scale, _FREQUENCY / 2**scale, 4 / _ANGLES
    wave = _gabor(size, width, turn, frequency, slant)
    bump = _gabor(size, width, turn, 0.0, slant)
    return wave - bump * (wave.sum() / bump.sum())


def _without_high(spectrum: Tensor, level: int, axes: tuple[int, ...] = (-2, -1)) -> Tensor:
    """What a grid 2^level times coarser cannot hold is zero, so that nothing folds over it."""
    kept = spectrum.clone()
    for axis in axes:
        side = spectrum.shape[axis]
        kept.narrow(axis, side >> (level + 1), side - (side >> level)).zero_()
    return kept


def _coarser(spectrum: Tensor, step: int) -> Tensor:
    """The spectrum of every step-th pixel."""
    height, width = (side // step for side in spectrum.shape[-2:])
    parts: Tensor = spectrum.unflatten(-1, (step, width)).unflatten(-3, (step, height))
    return parts.mean((-4, -2))
