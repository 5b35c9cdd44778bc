"""No record adds more than the bound, layer by layer, in every precision of a GPU.

tests/properties/hard_layers_test.py has the same on a CPU. CI has no GPU and skips.
"""

from __future__ import annotations

import pytest

from tests.support.hard_layers import HARD, LAYERS, contributions
from tests.support.products import PRECISIONS
from vestige.gradients.kernels import fused

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs a CUDA device with Triton")


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_no_record_adds_more_than_the_bound(name, precision, clipping):
    for hard in HARD:
        assert max(contributions(name, hard, precision, "cuda", clipping)) <= 1 + 1e-6, hard


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("name", LAYERS)
def test_an_ordinary_record_adds_nearly_all_of_the_bound(name, precision):
    """TF32 takes 2^-9 off every factor, and norms may be overstated by one per cent."""
    assert min(contributions(name, {}, precision, "cuda")) > 0.98
