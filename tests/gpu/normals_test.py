"""Noise made on a GPU: a function of seed and place, normal, and without an end at 6.7."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from vestige.gradients.kernels import fused
from vestige.sampling.normals import Held, gpu_normals, whole
from vestige.sampling.streams import NOISE, Randomness

pytestmark = pytest.mark.skipif(not fused.available(), reason="needs a CUDA device with Triton")
SEED = 0xF00D_FACE_CAFE_BEEF


def philox(seed, counter):
    """Philox 4x32 with ten rounds, one counter, in Python integers (Salmon et al. 2011)."""
    words = [counter % 2**32, counter >> 32, 0, 0]
    low, high = seed % 2**32, seed >> 32
    for _ in range(10):
        first, second = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [
            (second >> 32) ^ words[1] ^ low,
            second % 2**32,
            (first >> 32) ^ words[3] ^ high,
            first % 2**32,
        ]
        low, high = (low + 0x9E3779B9) % 2**32, (high + 0xBB67AE85) % 2**32
    return words


def reference(seed, place):
    """The number at one place, in float64."""
    a, b, c, _ = philox(seed, place // 2)
    radius = math.sqrt(-2 * math.log((a + (b + 0.5) * 2.0**-32) * 2.0**-32))
    return radius * (math.sin, math.cos)[place % 2 == 0](2 * math.pi * c * 2.0**-32)


@pytest.mark.parametrize("first", [0, 1, 4095, 2**31 - 2, 2**33 + 1])
def test_numbers_are_the_reference_s(first):
    like = torch.empty(301, device="cuda")
    made = gpu_normals(SEED, Held(first + 301, ((first, first + 301),)), like).cpu()
    exact = [reference(SEED, first + k) for k in range(301)]
    assert torch.allclose(made.double(), torch.tensor(exact).double(), atol=2e-5)


def test_a_part_of_a_vector_has_the_noise_of_the_whole():
    length, ranges = 700_001, ((3, 5), (1000, 300_001), (600_000, 700_001))
    everything = gpu_normals(SEED, whole(length), torch.empty(length, device="cuda"))
    held = sum(stop - start for start, stop in ranges)
    part = gpu_normals(SEED, Held(length, ranges), torch.empty(held, device="cuda"))
    assert torch.equal(part, torch.cat([everything[a:b] for a, b in ranges]))


def test_a_float64_vector_has_noise_of_its_own_precision():
    like = torch.empty(300_000, device="cuda", dtype=torch.float64)
    noise = gpu_normals(SEED, whole(300_000), like)
    assert not torch.equal(noise, noise.float().double())
    assert stats.kstest(noise.cpu().numpy(), "norm").pvalue > 1e-8


def test_the_law():
    noise = gpu_normals(SEED, whole(2**22), torch.empty(2**22, device="cuda")).cpu()
    assert stats.kstest(noise.numpy(), "norm").pvalue > 1e-8
    pairs = noise.view(-1, 2).double()
    assert abs(float((pairs[:, 0] * pairs[:, 1]).mean())) < 7 / math.sqrt(len(pairs))
    squares = pairs.square()
    assert abs(float((squares[:, 0] * squares[:, 1]).mean()) - 1) < 7 * math.sqrt(8 / len(pairs))


def test_far_numbers_are_as_frequent_as_they_should_be():
    """Beyond 5.5 standard deviations among 2^32 numbers: 163 expected."""
    found, like = 0, torch.empty(2**28, device="cuda")
    for k in range(16):
        held = Held(2**32, ((k * 2**28, (k + 1) * 2**28),))
        found += int((gpu_normals(SEED, held, like).abs() > 5.5).sum())
    expected = 2 * stats.norm.sf(5.5) * 2**32
    assert stats.poisson.cdf(found, expected) > 1e-5
    assert stats.poisson.sf(found - 1, expected) > 1e-5


def test_a_word_of_zeros_is_not_the_end():
    """With its first word zero a radius is 6.66 or beyond, as the second word says."""
    import triton
    import triton.language as tl

    from vestige.sampling.normal_program import pair

    @triton.jit
    def radii(second, out, N: tl.constexpr):
        at = tl.arange(0, N)
        b = tl.load(second + at).to(tl.uint32, bitcast=True)
        x, y = pair(b * 0, b, b * 0)
        tl.store(out + at, tl.sqrt(x * x + y * y))

    words = np.random.default_rng(0).integers(0, 2**32, 4096, dtype=np.uint32)
    second = torch.from_numpy(words.view(np.int32)).cuda()
    out = torch.empty(4096, device="cuda")
    radii[(1,)](second, out, N=4096)
    uniform = torch.exp(-out.double().square() / 2) * 2.0**32
    assert stats.kstest(uniform.cpu().numpy(), "uniform").pvalue > 1e-8
    assert float(out.max()) > 7.5


def test_a_run_s_noise_is_addressed_by_purpose_and_step():
    like = torch.empty(1000, device="cuda")
    draws = {
        (purpose, step): next(iter(Randomness(3).normal_blocks(like, step, purpose)))[1].cpu()
        for purpose in (NOISE, b"other")
        for step in (0, 1)
    }
    again = next(iter(Randomness(3).normal_blocks(like, 1, NOISE)))[1].cpu()
    assert torch.equal(draws[NOISE, 1], again)
    values = list(draws.values())
    assert all(not torch.equal(a, b) for i, a in enumerate(values) for b in values[:i])
