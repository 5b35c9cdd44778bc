"""Certified norms in torch: no record adds more than the bound, whatever its numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.products import PRECISIONS, Hard, exact_norms, exact_products
from vestige.gradients.kernels.reference import (
    add_weighted,
    clip_factors,
    product_norms,
    product_sums,
    round_to_tf32,
)

recipes = st.builds(
    Hard,
    n=st.integers(1, 4),
    t=st.integers(1, 24),
    p=st.integers(1, 40),
    d=st.integers(1, 40),
    precision=st.sampled_from(PRECISIONS),
    seed=st.integers(0, 2**31),
    cancel=st.sampled_from([None, 0.0, 2.0**-20, 2.0**-12, 2.0**-7, 0.1]),
    aligned=st.booleans(),
    exponents=st.tuples(st.integers(-148, 120), st.integers(-148, 120)),
    spread=st.sampled_from([0, 0, 3, 30, 120]),
    zeros=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(recipe=recipes, bound=st.sampled_from([1e-6, 1.0, 1e6]))
def test_no_record_adds_more_than_the_bound(recipe, bound):
    a, g = recipe.factors()
    factors = clip_factors(product_norms(a, g), bound)
    added = factors.double() * exact_norms(a, g)
    assert (added <= bound * (1 + 1e-6)).all()
    for i in range(recipe.n):  # as it is added, in the arithmetic of the sum
        total = torch.zeros(recipe.p, recipe.d)
        add_weighted(a[i : i + 1], g[i : i + 1], factors[i : i + 1], total)
        assert total.double().norm() <= bound * (1 + 1e-6)


def test_norms_of_products_without_their_slack_break_the_bound():
    # What the search above must be able to find: positions that cancel, added in another order.
    worst = 0.0
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        a, g = Hard(t=64, p=3, d=2, cancel=0.0, precision="fp32", seed=seed).factors()
        order = torch.randperm(64, generator=generator)
        a, g = a[:, order], g[:, order]
        computed, added = (
            product_sums(a[:, some], g[:, some]).double().flatten(1).norm(dim=1)
            for some in (order, order.flip(0))
        )
        worst = max(worst, float((added / computed.clamp(min=1e-30)).max()))
        assert (product_norms(a, g).sqrt() >= torch.maximum(computed, added)).all()
    assert worst > 2


def test_a_vanishing_times_a_huge_factor_is_not_missed():
    # |a| = 1e-25 and |g| = 1e25: every entry of a's Gram matrix would be zero.
    recipe = Hard(exponents=(-83, 83), precision="bf16")
    a, g = recipe.factors()
    norms = product_norms(a, g).sqrt()
    exact = exact_norms(a, g)
    assert (norms >= exact).all()
    assert (norms <= exact * 1.001).all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ordinary_norms_are_hardly_overstated(precision):
    a, g = Hard(n=8, t=16, p=60, d=80, precision=precision).factors()
    ratio = product_norms(a, g).sqrt() / exact_norms(a, g)
    assert (ratio >= 1).all()
    assert (ratio < 1.002).all()


def test_a_row_depends_on_no_other():
    a, g = Hard(n=5, t=8, p=12, d=10, precision="fp32").factors()
    alone = product_norms(a, g)
    for value in (0.0, 1e-42, 1e30, torch.inf, torch.nan):
        for other in (a, g):
            kept = other[2].clone()
            other[2] = value
            norms = product_norms(a, g)
            other[2] = kept
            assert torch.equal(norms[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])


def test_rows_that_cannot_be_added_have_an_infinite_norm_and_no_factor():
    a, g = Hard(n=6, precision="fp32").factors()
    a[1, 2, 3], g[2, 0, 0], a[3, 0, 1] = torch.nan, torch.inf, -torch.inf
    a[4], g[4] = 1e30, 1e30
    g[5] = 0
    norms = product_norms(a, g)
    assert norms.isinf().tolist() == [False, True, True, True, True, False]
    assert norms[5] == 0
    factors = clip_factors(norms, 1.0)
    assert (factors[1:5] == 0).all()
    assert factors[5] == 1
    total = torch.zeros(g.shape[2], a.shape[2])
    add_weighted(a, g, factors, total)
    expected = factors[0].double() * exact_products(a, g)[0]
    assert (total.double() - expected).norm() < 1e-6


class _NoReads(TorchDispatchMode):
    """Refuses what would make the host wait for the device."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert "local_scalar_dense" not in str(func), "the host reads a number"
        assert "nonzero" not in str(func), "a shape follows the numbers"
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_host_reads_nothing(precision):
    a, g = Hard(precision=precision, spread=30, zeros=True).factors()
    total = torch.zeros(g.shape[2], a.shape[2])
    with _NoReads():
        add_weighted(a, g, clip_factors(product_norms(a, g), 1.0), total)


def test_tf32_rounds_to_nearest_and_keeps_what_is_not_finite():
    values = torch.tensor([1.0, 1 + 2.0**-11, 1 + 2.0**-12, -3.1e-40, torch.inf, -torch.inf])
    assert torch.equal(
        round_to_tf32(values)[[0, 1, 2, 4, 5]],
        torch.tensor([1.0, 1 + 2.0**-10, 1.0, torch.inf, -torch.inf]),
    )
    assert round_to_tf32(torch.tensor([torch.nan])).isnan().all()
    x = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    assert ((round_to_tf32(x) - x).abs() <= 2.0**-11 * x.abs()).all()
    assert torch.equal(round_to_tf32(round_to_tf32(x)), round_to_tf32(x))
