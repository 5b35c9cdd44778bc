"""The choice of path, and what is left of the fused one where there is no GPU."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.support.products import Hard
from vestige.gradients.kernels import fused


def test_without_a_cuda_device_nothing_is_fused():
    a, g = Hard().factors()
    assert not fused.covers(a, g)


def test_the_room_imports_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None; from vestige.gradients.kernels import fused; "
        "assert 'vestige.gradients.kernels.programs' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_factors_of_different_lengths_are_never_multiplied():
    """A kernel takes the number of positions from one of them: the other must have as many."""
    a, g = torch.zeros(3, 16, 8), torch.zeros(3, 9, 4)
    for multiply in (
        lambda: fused.square_norms(a, g),
        lambda: fused.add_weighted(a, g, torch.ones(3), torch.zeros(4, 8)),
    ):
        with pytest.raises(ValueError, match="16 and 9 positions"):
            multiply()
    long = fused.of_one_length(a, g)
    assert [factor.shape[1] for factor in long] == [16, 16]
    assert not long[1][:, 9:].any()


def test_what_32_bits_cannot_reach_is_copied_or_not_taken():
    """Offsets within a record are 32-bit numbers: a batch-second view may reach too far."""
    near, far = torch.empty(2, 3, 4), torch.empty(1).expand(2, 2**16, 2**16)
    assert fused.reachable(near)
    wide = torch.empty_strided((2, 3, 4), (4, 2**31, 1), device="meta")
    assert not fused.reachable(wide)
    assert fused.reachable(far)  # strides of zero reach nothing
