"""Fused norms and sums on a GPU, held against float64: CI has no GPU and skips."""

from __future__ import annotations

import pytest
import torch

from tests.support.products import Hard, exact_norms, exact_products, rounded
from vestige.gradients.kernels import fused, reference
from vestige.gradients.kernels.bounds import FLOAT32_UNIT, accumulation

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs a CUDA device with Triton")

# (n, t, p, d): whole tiles, odd sizes, one position too many, a narrow weight, a long sequence.
SHAPES = [
    (4, 64, 128, 256),
    (3, 100, 130, 70),
    (40, 16, 512, 300),
    (5, 65, 24, 8),
    (33, 2, 40, 500),
    (2, 2500, 96, 160),
]
PRECISIONS = ["bf16", "tf32"]


@pytest.fixture(autouse=True)
def tf32_products():
    """float32 products on tensor cores, as the kernels expect."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


def made(shape, precision, **options):
    n, t, p, d = shape
    factors = Hard(n=n, t=t, p=p, d=d, precision=precision, **options).factors()
    return tuple(fused.arranged(x.cuda()) for x in factors)


def square_norms(a, g):
    return fused.square_norms(*fused.of_one_length(a, g))[0]


def add_weighted(a, g, factors, total):
    fused.add_weighted(*fused.of_one_length(a, g), factors, total)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_norms_are_those_of_float64_and_never_below(shape, precision):
    a, g = made(shape, precision)
    assert fused.covers(a, g)
    ratio = square_norms(a, g).sqrt() / exact_norms(a, g)
    assert (ratio >= 1).all()
    assert (ratio < 1.02).all()


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", SHAPES)
def test_sums_are_those_of_float64(shape, precision):
    a, g = made(shape, precision)
    factors = torch.rand(len(a), generator=torch.Generator().manual_seed(3)).cuda()
    total = torch.ones(shape[2], shape[3], device="cuda")
    add_weighted(a, g, factors, total)
    exact = 1 + torch.einsum("i,ipd->pd", factors.double(), exact_products(a, g))
    exact = exact[: shape[2], : shape[3]]  # zeros may stand behind the last feature
    assert (total.double() - exact).norm() < 2e-5 * exact.norm()


def test_numbers_are_laid_out_anew_and_rounded_to_tf32():
    values = torch.randn(3, 70, 90, generator=torch.Generator().manual_seed(0)).cuda()
    values[0, 0, :4] = torch.tensor([torch.inf, -torch.inf, torch.nan, 1e-41])
    values[1, 0, 0] = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    laid_out = fused.arranged(values)
    assert laid_out.stride(1) == 1
    assert laid_out.shape == (3, 96, 90)
    expected = reference.round_to_tf32(values).nan_to_num(9)
    assert torch.equal(laid_out[:, :70].nan_to_num(9), expected)
    assert not laid_out[:, 70:].any()
    half = values.bfloat16()
    laid_out = fused.arranged(half)
    assert laid_out.stride() == (70 * 96, 96, 1)
    assert torch.equal(laid_out[:, :, :90].nan_to_num(9), half.nan_to_num(9))
    assert not laid_out[:, :, 90:].any()
    turned = fused.arranged(half.transpose(1, 2).contiguous().transpose(1, 2))
    assert turned.shape == (3, 80, 90)
    assert turned.stride(1) == 1
    assert torch.equal(turned[:, :70].nan_to_num(9), half.nan_to_num(9))
    assert not turned[:, 70:].any()
    aligned = half[:, :, :80].contiguous()
    assert fused.arranged(aligned) is aligned
    pair = fused.arranged_pair(half, half.transpose(1, 2).contiguous().transpose(1, 2))
    assert pair[0].shape == (3, 80, 96)
    assert not pair[0][:, 70:].any()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_columns_with_positions_last_need_no_copy(precision):
    a, g = (x.contiguous() for x in made((6, 48, 40, 100), precision))
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (a, g)]
    assert turned[0].stride(1) == 1
    ours, theirs = (square_norms(*pair) for pair in (turned, (a, g)))
    assert torch.allclose(ours, theirs, rtol=1e-5)
    total = torch.zeros(2, 40, 100, device="cuda")
    for pair, part in zip((turned, (a, g)), total, strict=True):
        add_weighted(*pair, torch.ones(6, device="cuda"), part)
    assert (total[0] - total[1]).norm() < 1e-5 * total[0].norm()


HARD = [
    {"cancel": 0.0},
    {"cancel": 2.0**-7},
    {"cancel": 2.0**-12, "aligned": True},
    {"aligned": True},
    {"exponents": (-83, 83)},
    {"exponents": (83, -83), "cancel": 2.0**-7},
    {"exponents": (-140, 110)},
    {"exponents": (-148, 120), "cancel": 2.0**-7},
    {"exponents": (45, 45)},
    {"exponents": (-40, -40)},
    {"exponents": (-70, -70), "spread": 30},
    {"spread": 120, "zeros": True},
    {"zeros": True, "cancel": 2.0**-7},
]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("hard", HARD)
@pytest.mark.parametrize("bound", [1e-6, 1.0])
def test_no_record_adds_more_than_the_bound(hard, precision, bound):
    for seed in range(3):
        a, g = made((5, 90, 70, 200), precision, seed=seed, **hard)
        for form in (square_norms, reference.product_norms):
            factors = reference.clip_factors(form(a, g), bound)
            added = factors.double() * exact_norms(a, g)
            assert (added <= bound * (1 + 1e-6)).all()
            for i in range(len(a)):  # as it is added
                only = torch.zeros_like(factors)
                only[i] = factors[i]
                total = torch.zeros(70, 200, device="cuda")
                add_weighted(a, g, only, total)
                assert total.double().norm() <= bound * (1 + 1e-6)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("depth", [64, 1000, 4096])
def test_tensor_cores_stay_within_the_unit_that_is_assumed(precision, depth):
    # Terms of one sign round all one way; a large first term truncates all that follow.
    generator = torch.Generator().manual_seed(depth)
    x = torch.rand(1, depth, 64, generator=generator, dtype=torch.float64) + 0.5
    y = torch.rand(1, depth, 64, generator=generator, dtype=torch.float64) + 0.5
    for first in (1.0, 2.0**10):
        x[:, 0] *= first
        a, g = (fused.arranged(rounded(v, precision).cuda()) for v in (x, y))
        exact = exact_products(a, g)
        total = torch.zeros(64, 64, device="cuda")
        fused.add_weighted(a, g, torch.ones(1, device="cuda"), total)
        by_torch = reference.product_sums(a, g)
        for computed in (total, by_torch):
            error = ((computed.double() - exact).abs() / exact).max()
            print(f"{precision}, depth {depth}: {float(error / FLOAT32_UNIT):.1f} units")
            assert error <= accumulation(depth, a.dtype)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_results_repeat_bit_by_bit_and_rows_do_not_meet(precision):
    a, g = made((24, 70, 200, 300), precision)
    norms = square_norms(a, g)
    factors = reference.clip_factors(norms, 1.0)
    first, second = torch.zeros(2, 200, 300, device="cuda")
    add_weighted(a, g, factors, first)
    add_weighted(a, g, factors, second)
    assert torch.equal(first, second)
    assert torch.equal(norms, square_norms(a, g))
    for value in (0.0, 1e-42, 1e30, torch.inf, torch.nan):
        b = a.clone()
        b[7] = value
        others = torch.arange(24, device="cuda") != 7
        b = fused.arranged(b)  # laid out like a
        assert torch.equal(square_norms(b, g)[others], norms[others])


def test_rows_that_are_not_finite_add_nothing():
    a, g = made((6, 40, 50, 60), "bf16")
    a[1, 2, 3], g[2, 0, 0], a[3, 0, 1] = torch.nan, torch.inf, -torch.inf
    a[4], g[4] = 1e30, 1e30
    g[5] = 0
    norms = square_norms(a, g)
    assert norms.isinf().tolist() == [False, True, True, True, True, False]
    assert norms[5] == 0
    factors = reference.clip_factors(norms, 1.0)
    total = torch.zeros(50, 60, device="cuda")
    add_weighted(a, g, factors, total)
    expected = factors[0].double() * exact_products(a, g)[0, :50, :60]
    assert (total.double() - expected).norm() < 1e-5


def test_the_host_never_waits():
    a, g = made((6, 40, 50, 60), "bf16")
    total = torch.zeros(50, 60, device="cuda")
    add_weighted(a, g, reference.clip_factors(square_norms(a, g), 1.0), total)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for form in (square_norms, reference.product_norms):
            add_weighted(a, g, reference.clip_factors(form(a, g), 1.0), total)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def test_the_fused_certificate_is_the_one_of_the_reference():
    a, g = made((8, 128, 96, 160), "tf32", cancel=2.0**-7)
    ours, theirs = square_norms(a, g).sqrt(), reference.product_norms(a, g).sqrt()
    assert torch.allclose(ours, theirs, rtol=1e-4)
    assert fused.covers(a, g)
    torch.backends.cuda.matmul.allow_tf32 = False
    assert not fused.covers(a, g)  # float32 products are torch's
    assert fused.covers(a.bfloat16(), g.bfloat16())
