"""Norms without a product are not below the sum as it is added, and hardly above the true norm."""

from __future__ import annotations

import pytest
import torch

from vestige.gradients.rules.convolution import Convolved, Geometry
from vestige.gradients.uses import LookedUp, Outer, Tied


def all_round_up(t, width):
    """A large term, and many after it that are rounded to nearly twice their size, where all
    numbers of the clipped sum are 1.28 times a power of two."""
    a, g = torch.full((1, t, width), 2.0**-24 * 1.05 / 1.28), torch.ones(1, t, width)
    a[:, 0] = 1
    return a, g


def outer_of(a, g):
    return Outer(a, g)


def convolution_of(a, g):
    x, slopes = (v.transpose(1, 2).unsqueeze(3) for v in (a, g))
    weight = torch.zeros(g.shape[2], a.shape[2], 1, 1)
    return Convolved(x, slopes, weight, Geometry.of(weight))


def twice(a, g):
    """Tied to a table that looks as often: both sums round the same way."""
    words = g.shape[2]
    table = LookedUp(torch.zeros(1, a.shape[1], dtype=torch.long), a, words)
    return Tied([Outer(a, g), table])


def beside(a, g):
    """A table that already has the large term of another use when it adds the small ones."""
    first = torch.zeros_like(g[:, 0])
    first[0, 0] = 1
    looks = torch.zeros(1, a.shape[1] - 1, dtype=torch.long)
    return Tied([Outer(a[:, 0], first), LookedUp(looks, a[:, 1:].contiguous(), g.shape[2])])


@pytest.mark.parametrize("t", [50, 100])
@pytest.mark.parametrize(
    "make, width", [(outer_of, 200), (convolution_of, 200), (twice, 200), (beside, 156)]
)
def test_terms_that_all_round_one_way_stay_within_the_bound(make, width, t):
    """Norms by Gram matrices are exact where the sum is not: it may be longer than its norm."""
    use = make(*all_round_up(t, width))
    use.summed_with(4 * torch.finfo(torch.float32).eps)
    factors = use.square_norms().rsqrt().mul(1 - 2.0**-21).float()
    total = torch.zeros(use.shape)
    use.add_weighted(factors, total)
    assert float(total.double().norm()) <= 1 + 1e-6


@pytest.mark.parametrize("make", [outer_of, convolution_of])
def test_positions_that_have_nothing_to_do_with_each_other_are_hardly_overstated(make):
    random = torch.Generator().manual_seed(0)
    a, g = (torch.randn(2, 128, 256, generator=random) for _ in range(2))
    exact = (g.double().transpose(1, 2) @ a.double()).flatten(1).norm(dim=1)
    over = make(a, g).square_norms().sqrt() / exact - 1
    assert float(over.min()) >= 0 and float(over.max()) < 1e-3
