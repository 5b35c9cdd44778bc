"""Certified norms in torch: no record adds more than the bound, whatever its numbers are."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.products import PRECISIONS, Hard, exact_norms, exact_products
from vestige.gradients.kernels.bounds import FACTOR_ON_BF16, FACTOR_SPLIT
from vestige.gradients.kernels.reference import (
    add_split,
    add_weighted,
    clip_factors,
    gram_norms,
    product_norms,
    round_to_tf32,
    rounded,
    split,
)

FORMS = {"gram": gram_norms, "product": product_norms}

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
@given(recipe=recipes, form=st.sampled_from(list(FORMS)), bound=st.sampled_from([1e-6, 1.0, 1e6]))
def test_no_record_adds_more_than_the_bound(recipe, form, bound):
    a, g = recipe.factors()
    factors = clip_factors(FORMS[form](a, g), bound)
    added = factors.double() * exact_norms(a, g)
    assert (added <= bound * (1 + 1e-6)).all()
    for i in range(recipe.n):  # as it is added, in the arithmetic of the sum
        total = torch.zeros(recipe.p, recipe.d)
        add_weighted(a[i : i + 1], g[i : i + 1], factors[i : i + 1], total)
        assert total.double().norm() <= bound * (1 + 1e-6)


@settings(max_examples=150, deadline=None)
@given(recipe=recipes, form=st.sampled_from(list(FORMS)))
def test_a_factor_split_in_two_stays_within_the_bound(recipe, form):
    a, g = recipe.factors()
    a, g = a.bfloat16(), g.bfloat16()
    factors = clip_factors(FORMS[form](a, g, FACTOR_SPLIT), 1.0)
    kept = (factors > 0).view(-1, 1, 1)
    high, low = split(torch.where(kept, g.float() * factors.view(-1, 1, 1), 0))
    added = exact_norms(a, high.double() + low.double())
    assert (added <= 1 + 1e-6).all()


@settings(max_examples=150, deadline=None)
@given(recipe=recipes)
def test_without_positions_the_scaled_gradient_may_be_rounded_once(recipe):
    a, g = (x[:, :1].bfloat16() for x in recipe.factors())
    factors = clip_factors(gram_norms(a, g, FACTOR_ON_BF16), 1.0)
    kept = (factors > 0).view(-1, 1, 1)
    once = torch.where(kept, g.float() * factors.view(-1, 1, 1), 0).bfloat16()
    assert (exact_norms(a, once) <= 1 + 1e-6).all()


def test_gram_matrices_without_their_slack_break_the_bound():
    # What the search above must be able to find: positions that cancel, in float32.
    worst = 0.0
    for seed in range(20):
        recipe = Hard(t=64, p=300, d=300, cancel=2.0**-7, precision="bf16", seed=seed)
        a, g = recipe.factors()
        a, g = a.float(), g.float()
        g[:, 32:] = -g[:, :32]
        g[:, 32, 0] *= 1 + 2.0**-7
        grams = torch.bmm(a, a.transpose(1, 2)) * torch.bmm(g, g.transpose(1, 2))
        computed = grams.sum((1, 2)).clamp(min=0).double()
        worst = max(worst, float((exact_norms(a, g) / computed.sqrt().clamp(min=1e-30)).max()))
        assert (gram_norms(a, g).sqrt() >= exact_norms(a, g)).all()
        assert (product_norms(a, g).sqrt() >= exact_norms(a, g)).all()
    assert worst > 2


@pytest.mark.parametrize("form", FORMS)
def test_a_vanishing_times_a_huge_factor_is_not_missed(form):
    # |a| = 1e-25 and |g| = 1e25: every entry of a's Gram matrix would be zero.
    recipe = Hard(exponents=(-83, 83), precision="bf16")
    a, g = recipe.factors()
    norms = FORMS[form](a, g).sqrt()
    exact = exact_norms(a, g)
    assert (norms >= exact).all()
    assert (norms <= exact * 1.001).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_ordinary_norms_are_hardly_overstated(form, precision):
    a, g = Hard(n=8, t=16, p=60, d=80, precision=precision).factors()
    ratio = FORMS[form](a, g).sqrt() / exact_norms(a, g)
    assert (ratio >= 1).all()
    assert (ratio < 1.002).all()


@pytest.mark.parametrize("form", FORMS)
def test_float64_is_as_exact_as_float64(form):
    recipe = Hard(n=6, t=12, p=30, d=20, cancel=2.0**-12)
    a, g = (x.double() for x in recipe.factors())
    a[0], g[0] = a[0] * 1e-200, g[0] * 1e200
    norms, exact = FORMS[form](a, g).sqrt(), exact_norms(a, g)
    assert (norms >= exact).all()
    assert (norms <= exact * (1 + 1e-5)).all()


@pytest.mark.parametrize("form", FORMS)
def test_a_row_depends_on_no_other(form):
    a, g = Hard(n=5, t=8, p=12, d=10, precision="fp32").factors()
    alone = FORMS[form](a, g)
    for value in (0.0, 1e-42, 1e30, torch.inf, torch.nan):
        for other in (a, g):
            kept = other[2].clone()
            other[2] = value
            norms = FORMS[form](a, g)
            other[2] = kept
            assert torch.equal(norms[[0, 1, 3, 4]], alone[[0, 1, 3, 4]])


@pytest.mark.parametrize("form", FORMS)
def test_rows_that_cannot_be_added_have_an_infinite_norm_and_no_factor(form):
    a, g = Hard(n=6, precision="fp32").factors()
    a[1, 2, 3], g[2, 0, 0], a[3, 0, 1] = torch.nan, torch.inf, -torch.inf
    a[4], g[4] = 1e30, 1e30
    g[5] = 0
    norms = FORMS[form](a, g)
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
        for form in FORMS.values():
            factors = clip_factors(form(rounded(a), rounded(g)), 1.0)
            add_weighted(a, g, factors, total)
        add_split(a.bfloat16(), g.bfloat16(), factors, total)


def test_a_split_sum_is_the_sum():
    a, g = Hard(n=7, t=9, precision="bf16").factors()
    factors = torch.rand(7, generator=torch.Generator().manual_seed(1))
    factors[3], a[3, 0, 0] = 0, torch.inf
    ours, theirs = torch.zeros(5, 7), torch.zeros(5, 7)
    add_split(a, g, factors, ours)
    add_weighted(a, g, factors, theirs)
    assert (ours - theirs).norm() < 2.0**-14 * theirs.norm()


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
