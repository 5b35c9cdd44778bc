"""Scattering: a loop of convolutions, kymatio's numbers, rows apart.

scattering_kymatio.npz has what kymatio 0.3.0 makes of one image, on a part of the grid. Where
kymatio is installed, it is written anew by

    python -m tests.unit.train.recipes.scattering_test
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import torch

from vestige import ConfigError
from vestige.train.recipes.scattering import Scattering, _gabor, _morlet

KYMATIO = Path(__file__).with_name("scattering_kymatio.npz")
KYMATIO_S = [((32, 32), 2), ((28, 28), 2), ((16, 32), 1)]  # sizes and scales
ONE, GRID = (1, 2), (slice(None, None, 5), slice(None, None, 3))  # of images, and of their maps


def images(*shape):
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def blurred(values, size, scales):
    """A circular average of float64 maps by a Gaussian, at every 2^scales-th pixel."""
    low = _gabor(size, 0.8 * 2 ** (scales - 1), 0.0, 0.0, 1.0)
    return torch.fft.ifft2(torch.fft.fft2(values) * torch.fft.fft2(low)).real


def test_two_orders_are_moduli_of_convolutions():
    """All at full size in float64, which subsampling on the way changes by little."""
    x, size = images(2, 3, 32, 32), (40, 40)
    padded = torch.nn.functional.pad(x, (4, 4, 4, 4), mode="reflect").double()

    def wave(values, scale, k):
        spectrum = torch.fft.fft2(_morlet(size, scale, (3 - k) * math.pi / 8))
        return torch.fft.ifft2(torch.fft.fft2(values) * spectrum).abs()

    expected = [padded]
    expected += [wave(padded, j, k) for j in (0, 1) for k in range(8)]
    expected += [wave(wave(padded, 0, k), 1, m) for k in range(8) for m in range(8)]
    maps = torch.stack([blurred(v, size, 2)[..., 4:-4:4, 4:-4:4] for v in expected], dim=2)
    made = Scattering((32, 32))(x)
    assert made.shape == (2, 243, 8, 8)
    scale = maps.abs().amax((0, 1, 3, 4))
    error = (made.view(2, 3, 81, 8, 8) - maps).abs().amax((0, 1, 3, 4)) / scale
    assert float(error[:9].max()) < 1e-6  # the finest waves are not subsampled
    assert float(error.max()) < 0.06


@pytest.mark.parametrize(("size", "scales"), KYMATIO_S)
def test_the_numbers_are_kymatio_s(size, scales):
    with np.load(KYMATIO) as kept:
        theirs = torch.from_numpy(kept[key(size, scales)]).double()
    # Its filters are divided by 2 * 3.1415: once for the average and once for every wave.
    waves = torch.tensor([0] + [1] * (8 * scales) + [2] * (32 * scales * (scales - 1)))
    theirs = theirs * ((3.1415 / math.pi) ** (1 + waves.double()))[:, None, None]
    ours = Scattering(size, scales)(images(2, 3, *size)).unflatten(1, (3, -1))
    ours = ours[(*ONE, slice(None), *GRID)].double()
    assert theirs.shape == ours.shape == (len(waves), *theirs.shape[1:])
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 2e-6


def test_an_image_s_features_are_its_own():
    scattering, x = Scattering((16, 16)), images(5, 1, 16, 16)
    together = scattering(x)
    for row in range(5):
        assert torch.equal(scattering(x[row : row + 1])[0], together[row])


def test_all_images_at_once_are_the_images_one_by_one():
    """What a GPU does."""
    scattering, x = Scattering((16, 16)), images(5, 3, 16, 16)
    torch.testing.assert_close(scattering._features(x), scattering(x), rtol=1e-4, atol=1e-6)


def test_nothing_is_learned_or_saved():
    scattering = Scattering((8, 8))
    assert not list(scattering.parameters())
    assert not scattering.state_dict()


@pytest.mark.parametrize(("size", "scales"), [((30, 32), 2), ((2, 4), 2), ((8, 8), 0)])
def test_sizes_that_do_not_fit_the_grid_are_refused(size, scales):
    with pytest.raises(ConfigError, match=r"multiples of 2\^"):
        Scattering(size, scales)


def key(size, scales):
    return f"{size[0]}x{size[1]}, {scales} scales"


def write():
    """What kymatio makes of one channel of an image."""
    if not hasattr(scipy.special, "sph_harm"):  # which its three-dimensional part imports
        scipy.special.sph_harm = None
    from kymatio.torch import Scattering2D

    kept = {}
    for size, scales in KYMATIO_S:
        made = Scattering2D(J=scales, shape=size)(images(2, 3, *size))
        kept[key(size, scales)] = made[(*ONE, slice(None), *GRID)].numpy()
    np.savez_compressed(KYMATIO, **kept)


if __name__ == "__main__":
    write()
