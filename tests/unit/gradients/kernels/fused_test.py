"""The choice of path, and what is left of the fused one where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import torch

from tests.support.products import Hard, exact_norms, exact_products
from vestige.gradients import kernels
from vestige.gradients.kernels import fused, reference


def test_without_a_cuda_device_nothing_is_fused():
    a, g = Hard().factors()
    assert not fused.covers(a, g)


def test_the_room_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; from vestige.gradients import kernels; "
        "assert 'vestige.gradients.kernels.programs' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_norms_and_sums_of_the_path_that_is_chosen():
    for shape in ({"t": 2, "p": 40, "d": 50}, {"t": 30, "p": 4, "d": 5}):
        a, g = (kernels.as_multiplied(x) for x in Hard(**shape, precision="fp32").factors())
        factors = kernels.clip_factors(kernels.square_norms(a, g), 1.0)
        assert (factors.double() * exact_norms(a, g) <= 1).all()
        total = torch.zeros(shape["p"], shape["d"])
        kernels.add_weighted(a, g, factors, total)
        exact = torch.einsum("i,ipd->pd", factors.double(), exact_products(a, g))
        assert (total - exact).norm() < 1e-5 * exact.norm()


def test_small_gram_matrices_are_taken_where_they_are_tight():
    a, g = Hard(t=2, p=40, d=50).factors()
    assert torch.equal(kernels.square_norms(a, g), reference.gram_norms(a, g))
    a, g = Hard(t=30, p=4, d=5).factors()
    assert torch.equal(kernels.square_norms(a, g), reference.product_norms(a, g))


def test_half_precision_is_widened_and_the_rest_counts_as_given():
    values = torch.randn(2, 3, 4)
    assert kernels.as_multiplied(values.half()).dtype == torch.float32
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        given = values.to(dtype)
        assert kernels.as_multiplied(given) is given
