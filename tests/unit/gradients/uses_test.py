"""Every use agrees with its own dense gradients: norms, weighted sums, dropped examples."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from vestige.gradients.rules.convolution import Convolved, Geometry
from vestige.gradients.uses import LookedUp, Outer, PerExample, Tied, Use, Viewed, row_squares

ROWS = 5


def r(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64)


def convolved() -> Use:
    x, weight = r(ROWS, 2, 6, 6), r(3, 2, 3, 3)
    return Convolved(x, F.conv2d(x, weight), weight, Geometry.of(weight))


def viewed() -> Use:
    parameter = r(4, 3)
    return Viewed(Outer(r(ROWS, 3), r(ROWS, 2)), parameter, parameter[1:3])


USES: dict[str, Callable[[], Use]] = {
    "per example": lambda: PerExample(r(ROWS, 4, 3)),
    "one outer product": lambda: Outer(r(ROWS, 3), r(ROWS, 4)),
    "outer products, few": lambda: Outer(r(ROWS, 2, 30), r(ROWS, 2, 40)),
    "outer products, many": lambda: Outer(r(ROWS, 50, 3), r(ROWS, 50, 4)),
    "looked up": lambda: LookedUp(torch.randint(0, 4, (ROWS, 6)), r(ROWS, 6, 3), 4),
    "a convolution": convolved,
    "a view": viewed,
    "tied": lambda: Tied(
        [Outer(r(ROWS, 3), r(ROWS, 4)), LookedUp(torch.randint(0, 4, (ROWS, 6)), r(ROWS, 6, 3), 4)]
    ),
    "tied without a cheap form": lambda: Tied(
        [PerExample(r(ROWS, 4, 3)), PerExample(r(ROWS, 4, 3))]
    ),
}


@pytest.mark.parametrize("name", USES)
def test_norms_and_sums_are_those_of_the_dense_gradients(name):
    torch.manual_seed(0)
    use = USES[name]()
    dense, factors = use.dense().clone(), torch.rand(ROWS, dtype=torch.float64)
    assert dense.shape == (ROWS, *use.shape)
    norms, total = use.square_norms(), torch.zeros(use.shape, dtype=torch.float64)
    assert torch.allclose(norms, dense.flatten(1).square().sum(1), rtol=1e-9)
    assert bool((norms >= dense.flatten(1).square().sum(1) * (1 - 1e-12)).all())
    use.add_weighted(factors, total)
    assert torch.allclose(total, torch.einsum("n,n...->...", factors, dense), rtol=1e-9)


@pytest.mark.parametrize("name", USES)
def test_an_example_that_is_dropped_contributes_nothing(name):
    torch.manual_seed(0)
    use = USES[name]()
    dense = use.dense().clone()
    use.square_norms()
    use.drop(torch.tensor([False, True, False, False, False]))
    total = torch.zeros(use.shape, dtype=torch.float64)
    use.add_weighted(torch.ones(ROWS, dtype=torch.float64), total)
    assert torch.allclose(total, dense[[0, 2, 3, 4]].sum(0), rtol=1e-9)


@pytest.mark.parametrize("seed", range(8))
def test_tied_uses_are_measured_by_the_numbers_that_are_added(seed):
    """Positions that cancel, kept as their product, and a table that takes the product back."""
    random = torch.Generator().manual_seed(seed)
    n, t, words, width = 4, 128, 16, 16
    x = torch.randn(n, t, width, generator=random)
    g = torch.randn(n, t, words, generator=random)
    nearly = 1 + 2.0**-16 * torch.randn(n, t // 2, words, generator=random)
    x[:, t // 2 :], g[:, t // 2 :] = -x[:, : t // 2], g[:, : t // 2] * nearly
    order = torch.randperm(t, generator=random)
    x, g = x[:, order], g[:, order]
    taken_back = -torch.bmm(g.double().transpose(1, 2), x.double()).float()
    table = LookedUp(torch.arange(words).expand(n, words), taken_back, words)
    use = Tied([Outer(x, g), table])
    use.summed_with(4 * torch.finfo(torch.float32).eps)
    factors = use.square_norms().rsqrt().clamp(max=1e30).float() * (1 - 1e-6)
    for row in range(n):
        total = torch.zeros(words, width)
        use.add_weighted(torch.where(torch.arange(n) == row, factors, 0.0), total)
        assert total.double().norm() <= 1 + 1e-6


@pytest.mark.parametrize("t", [512, 8192, 16384])
def test_many_looks_at_one_row_that_all_round_up_stay_within_the_bound(t):
    """A large number, many that are each rounded to twice their size, and the large one back."""
    g = torch.full((1, t, 1), 1 + 2.0**-20)
    g[0, 0], g[0, -1] = 2.0**24, -(2.0**24)
    use = LookedUp(torch.zeros(1, t, dtype=torch.long), g, 2)
    norm, total = float(use.square_norms().sqrt()), torch.zeros(2, 1)
    use.add_weighted(torch.ones(1), total)  # a bound of `norm` leaves it as it is
    assert float(total.double().norm()) <= norm * (1 + 1e-6)


def test_looks_at_different_rows_are_hardly_overstated():
    g = torch.randn(3, 700, 8, generator=torch.Generator().manual_seed(0))
    use = LookedUp(torch.arange(700).expand(3, 700), g, 700)
    exact = g.double().flatten(1).norm(dim=1)
    assert torch.allclose(use.square_norms().sqrt(), exact, rtol=1e-4)


@pytest.mark.parametrize("other", [0.0, 1e-20, 1e20, torch.inf, torch.nan])
@pytest.mark.parametrize("width", [288, 300])
def test_no_row_decides_how_the_norms_of_others_are_taken(width, other):
    """Float32 serves where nothing over- or underflows: that is asked of each row by itself."""
    values = torch.randn(40, width, generator=torch.Generator().manual_seed(0))
    alone, exact = row_squares(values), values.double().square().sum(1)
    assert torch.allclose(alone, exact, rtol=1e-6) and not torch.equal(alone, exact)
    values[7] = other
    beside = row_squares(values)
    assert torch.equal(beside[:7], alone[:7]) and torch.equal(beside[8:], alone[8:])
    if width * other**2 < torch.inf:
        assert float(beside[7]) == pytest.approx(width * float(values[7, 0].double()) ** 2, 1e-6)
    else:
        assert not beside[7].isfinite()
