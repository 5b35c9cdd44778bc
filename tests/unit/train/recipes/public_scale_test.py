"""Constants of random images: always the same, and close to those of photographs."""

from __future__ import annotations

import pytest
import torch

from vestige.train.recipes.public_scale import InGroups, PublicScale, random_images
from vestige.train.recipes.scattering import Scattering


def test_random_images_are_always_the_same():
    images = random_images((3, 16, 16), count=5)
    assert images.shape == (5, 3, 16, 16)
    assert torch.equal(images, random_images((3, 16, 16), count=5))
    assert (images.min() >= 0) & (images.max() <= 1)


def test_their_amplitude_falls_with_frequency():
    images = random_images((1, 32, 32), count=200) - 0.5
    power = torch.fft.fft2(images).abs().square().mean((0, 1))
    # 1 / f in amplitude is 1 / f^2 in power; what is cut off at 0 and 1 moves it a little.
    assert power[0, 2] / power[0, 8] == pytest.approx(16, rel=0.3)


def test_colours_move_together():
    images = random_images((3, 16, 16)).transpose(0, 1).flatten(1)
    assert torch.corrcoef(images)[0, 1] == pytest.approx(0.9, abs=0.05)


def test_features_of_such_images_come_to_one_scale():
    scale = PublicScale(Scattering((16, 16)), (1, 16, 16))
    seen = scale(Scattering((16, 16))(random_images((1, 16, 16))))
    assert torch.allclose(seen.mean((0, 2, 3)), torch.zeros(81), atol=1e-4)
    assert torch.allclose(seen.std((0, 2, 3)), torch.ones(81), atol=1e-4)


def test_the_constants_are_saved_with_the_model():
    assert set(PublicScale(torch.nn.Identity(), (1, 8, 8)).state_dict()) == {"mean", "deviation"}


def test_groups_of_an_image_have_one_mean_and_deviation_and_are_its_own():
    random = torch.Generator().manual_seed(0)
    x = torch.rand(4, 81, 7, 7, generator=random)
    x = x * (0.2 + torch.rand(81, 1, 1, generator=random))
    seen = InGroups()(x).view(4, 27, -1)
    assert torch.allclose(seen.mean(2), torch.zeros(4, 27), atol=1e-4)
    assert torch.allclose(seen.std(2, correction=0), torch.full((4, 27), 7.0), rtol=1e-2)
    assert torch.equal(InGroups()(x[1:2]), InGroups()(x)[1:2])
