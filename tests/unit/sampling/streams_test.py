"""Secret streams: addressed by step, repeated by a seed, normal far out, and never saved."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats

from vestige import ConfigError
from vestige.sampling.streams import LOTS, NOISE, Randomness

FALSE_ALARM = 1e-8


def normals(source, step, count, dtype=torch.float32):
    """The standard normal noise of `step`, put together from its blocks."""
    blocks = source.normal_blocks(torch.zeros(count, dtype=dtype), step)
    return torch.cat([noise.clone() for _, noise in blocks])


def test_the_streams_cannot_be_saved():
    for way in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="secret"):
            way(Randomness(3))


@pytest.mark.parametrize("secure", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_noise_seed_repeats_every_step_bit_for_bit(dtype, secure):
    def draw(seed, step):
        return normals(Randomness(seed, secure), step, 1001, dtype)

    for step in (0, 1, 1000):
        assert torch.equal(draw(7, step), draw(7, step))
        assert not torch.equal(draw(7, step), draw(8, step))
    assert not torch.equal(draw(None, 0), draw(None, 0))


@pytest.mark.parametrize("seed", [None, 7])
def test_steps_draw_independent_noise(seed):
    """Correlations between eight steps, 28 pairs of 10^5 numbers, none beyond 7 standard errors."""
    source, n = Randomness(seed), 100_000
    steps = np.stack([normals(source, t, n).numpy() for t in range(8)])
    correlation = np.corrcoef(steps)
    np.fill_diagonal(correlation, 0)
    # P(|N(0,1)| > 7) is 2.6e-12, times 28 pairs.
    assert np.abs(correlation).max() < 7 / math.sqrt(n)


def test_lots_and_noise_never_share_a_number():
    """Purposes and steps have streams of their own: 40,000 numbers of 53 bits, none twice."""
    source = Randomness(7)
    drawn = [source.uniforms(p, t, 1000) for p in (LOTS, NOISE) for t in range(20)]
    # P(any two of 4e4 numbers agree by chance) is 9e-8, and the seed is fixed.
    assert len(np.unique(np.concatenate(drawn))) == 40_000


def test_a_longer_draw_begins_with_the_shorter_one():
    source = Randomness(7)
    assert np.array_equal(source.uniforms(LOTS, 3, 10), source.uniforms(LOTS, 3, 1000)[:10])


def test_uniforms_are_uniform_and_never_zero():
    u = Randomness().uniforms(LOTS, 0, 200_000)
    assert u.min() > 0
    assert u.max() <= 1
    assert stats.kstest(u, "uniform").pvalue > FALSE_ALARM


def test_a_noise_seed_must_be_a_whole_number():
    for bad in (1.5, "7", True):
        with pytest.raises(ConfigError, match="noise_seed"):
            Randomness(bad)


def test_far_numbers_are_as_frequent_as_they_should_be():
    """Beyond 4.8 standard deviations, where the refined radii have their part: 16 million draws."""
    from scipy.stats import norm, poisson

    like = torch.empty(2**24)
    blocks = Randomness(3).normal_blocks(like, 0)
    found = sum(int((noise.abs() > 4.8).sum()) for _, noise in blocks)
    expected = 2 * norm.sf(4.8) * 2**24  # 26.6
    assert poisson.cdf(found, expected) > 1e-4
    assert poisson.sf(found - 1, expected) > 1e-4
