"""The ring of releases on a GPU: products in one pass, the CPU's numbers, no more than one read.

TRITON_INTERPRET=1 runs the programs alone on a CPU with Triton installed.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from itertools import pairwise

import numpy as np
import pytest
import torch

from tests.support.memory_runs import releases
from vestige.gradients.kernels import fused
from vestige.memory.history import History, Keeping

ON_GPU = fused.available()
INTERPRETED = find_spec("triton") is not None and os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cuda" if ON_GPU else "cpu"
needs_gpu = pytest.mark.skipif(not ON_GPU, reason="needs a CUDA device with Triton")
NARROW = Keeping(torch.bfloat16)


@pytest.mark.skipif(not ON_GPU and not INTERPRETED, reason="needs Triton and a device")
@pytest.mark.parametrize("dtype, close", [(torch.float32, 1e-6), (torch.float64, 1e-14)])
@pytest.mark.parametrize("kept", [None, torch.bfloat16])
@pytest.mark.parametrize("rows", [1, 7, 9])
def test_one_pass_has_the_products_and_mixtures_of_float64(rows, kept, dtype, close):
    from vestige.memory.ring_program import PIECE, Pieces

    ends = [0, 5, 6, PIECE + 9, 2 * PIECE + 9, 5 * PIECE - 1]
    segments = [slice(a, b) for a, b in pairwise(ends)]
    pieces = Pieces(segments, torch.device(DEVICE))
    generator = torch.Generator().manual_seed(0)
    ring = torch.randn(rows, ends[-1], generator=generator).to(DEVICE, kept or dtype)
    new = torch.randn(ends[-1], generator=generator).to(DEVICE, dtype)
    factors = torch.randn(len(segments), rows, generator=generator).to(DEVICE, dtype)
    mixed = torch.full_like(new, torch.nan)
    pieces.mix(ring, factors, mixed)
    products = pieces.dots(ring, new)
    assert products.dtype == torch.float64
    for part, columns in enumerate(segments):
        wide, x = ring[:, columns].double(), new[columns].double()
        lengths = wide.norm(dim=1) * x.norm()
        assert ((products[part] - wide @ x).abs() <= close * lengths).all()
        expected = factors[part].double() @ wide
        size = factors[part].double().abs() @ wide.abs()
        assert ((mixed[columns].double() - expected).abs() <= close * size).all()
    assert torch.equal(products, pieces.dots(ring, new))


@needs_gpu
@pytest.mark.parametrize("keeping", [Keeping(), NARROW, Keeping(device=torch.device("cpu"))])
@pytest.mark.parametrize("parts", [1, 3])
def test_a_history_on_a_gpu_has_the_products_of_its_releases(parts, keeping):
    stream, groups = releases(9, size=70_001, parts=parts, dtype=torch.float32, device="cuda")
    history, past = History(groups.segments(), groups.buffer(), 4, 0.3, keeping), []
    for release in stream:
        history.append(release)
        past.insert(0, release.values.to(keeping.dtype or torch.float32).double())
    for g, part in enumerate(groups.segments()):
        rows = torch.stack([s[part] for s in past[:3]])
        exact = (rows @ rows.T).cpu().numpy()
        assert np.allclose(history.view().gram[g], exact, rtol=1e-5, atol=1e-2)
        branch = history.mix(np.array([[0.5, 0.3, 0.2]] * parts))
        weights = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64, device="cuda")
        assert torch.allclose(branch.values[part].double(), weights @ rows, atol=1e-5)


@needs_gpu
@pytest.mark.parametrize("keeping", [Keeping(), NARROW])
def test_a_mixture_makes_no_device_wait(keeping):
    stream, groups = releases(4, size=70_001, parts=2, dtype=torch.float32, device="cuda")
    history = History(groups.segments(), groups.buffer(), 4, 0.3, keeping)
    for release in stream:
        history.append(release)
    history.mix(np.ones((2, 3)))
    torch.cuda.set_sync_debug_mode("error")
    try:
        history.mix(np.ones((2, 3)))
    finally:
        torch.cuda.set_sync_debug_mode("default")
