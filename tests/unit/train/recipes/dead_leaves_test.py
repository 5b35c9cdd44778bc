"""Images of a random process: of their seed alone, and unlike noise."""

from __future__ import annotations

import pytest
import torch

from vestige.train.recipes.dead_leaves import dead_leaves, two_views


def test_images_are_a_function_of_their_seed():
    torch.manual_seed(1)
    before = torch.random.get_rng_state()
    images = dead_leaves(6, 24, seed=5)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert images.shape == (6, 3, 24, 24)
    assert (images.min() >= 0) & (images.max() <= 1)
    assert torch.equal(images, dead_leaves(6, 24, seed=5))
    others = dead_leaves(6, 24, seed=6)
    assert len(torch.cat([images, others]).flatten(1).unique(dim=0)) == 12


def test_leaves_have_surfaces_and_edges():
    images = dead_leaves(64, 32, seed=0)
    steps = (images[..., 1:] - images[..., :-1]).abs().mean(1).flatten()
    # Of noise with the same spread hardly a neighbour is like another one.
    noise = images.flatten()[torch.randperm(images.numel())].view_as(images)
    noisy = (noise[..., 1:] - noise[..., :-1]).abs().mean(1).flatten()
    assert float((steps < 0.02).float().mean()) > 10 * float((noisy < 0.02).float().mean())
    assert float((steps > 0.2).float().mean()) > 0.02


def test_two_views_are_of_one_image():
    images = dead_leaves(48, 24, seed=0)
    views = two_views(images, 16, seed=1)
    assert views.shape == (96, 3, 16, 16)
    assert torch.equal(views, two_views(images, 16, seed=1))
    assert not views[:48].isclose(views[48:]).flatten(1).all(1).any()
    # A row of views is made of its image alone.
    other = images.clone()
    other[0] = 0.5
    changed = (two_views(other, 16, seed=1) != views).flatten(1).any(1)
    assert changed.nonzero().flatten().tolist() == [0, 48]


@pytest.mark.parametrize("side", [8, 20])
def test_any_size(side):
    assert dead_leaves(2, side, seed=0).isfinite().all()
