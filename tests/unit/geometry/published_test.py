"""GeoDP as published, and counterexamples to its sensitivity."""

from __future__ import annotations

import math

import pytest
import torch
from scipy.stats import norm

from tests.support.directions import (
    each_geometry,
    lengths_of,
    normal,
    reference_angles,
    reference_vector,
)
from vestige.errors import ConfigError
from vestige.geometry import (
    angle_scale,
    perturbed,
    to_hyperspherical,
)


def gaussian_delta(epsilon, shift):
    """delta of a Gaussian mechanism whose outputs are `shift` standard deviations apart."""
    # In logarithms: e^epsilon times a tail probability may be 0 * inf.
    tail = math.exp(min(700.0, epsilon + norm.logcdf(-shift / 2 - epsilon / shift)))
    return float(norm.cdf(shift / 2 - epsilon / shift)) - tail


def published_reference(mean, noise, clip, batch, bounding):
    """The published equations, one angle at a time."""
    d = len(mean)
    scale = math.sqrt(d + 2) * bounding * math.pi / batch
    radius = math.hypot(*mean.tolist()) + clip / batch * float(noise[0])
    angles = reference_angles(mean)
    return reference_vector(
        radius, [a + scale * n for a, n in zip(angles, noise[1:].tolist(), strict=True)]
    )


BATCH, BOUNDING = 64, 0.1


CLAIMED = gaussian_delta(10.0, math.sqrt(2))  # radius and angles at sigma = 1 each


def opposing_batches():
    """Counterexample (a): 63 gradients that sum to -e_1 / 2, and one more of e_1 (C = 1)."""
    others = torch.zeros(BATCH - 1, 2, dtype=torch.float64)
    others[:, 0] = -0.5 / (BATCH - 1)
    return others, torch.tensor([[1.0, 0.0]], dtype=torch.float64)


@pytest.mark.parametrize("size", [2, 3, 40])
def test_the_published_equations(size):
    mean, noise = normal(size), 3 * normal(size, seed=1)
    out = perturbed(mean, noise, 0.5, 16, 0.3)
    torch.testing.assert_close(out, published_reference(mean, noise, 0.5, 16, 0.3))
    torch.testing.assert_close(perturbed(mean, torch.zeros(size), 0.5, 16, 0.3), mean)
    assert perturbed(mean.float(), noise.float(), 0.5, 16, 0.3).dtype == torch.float32


def test_published_arguments():
    mean = torch.ones(4)
    for wrong in ({"clip": 0.0}, {"batch": 0}, {"bounding": 0.0}, {"bounding": 1.5}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            perturbed(mean, mean, **{"clip": 1.0, "batch": 8, "bounding": 0.5, **wrong})
    with pytest.raises(ConfigError, match="noise of shape"):
        perturbed(mean, torch.ones(3), 1.0, 8, 0.5)


def test_one_example_turns_the_mean_by_pi():
    others, one = opposing_batches()
    without, with_it = others.sum(0) / BATCH, torch.cat([others, one]).sum(0) / BATCH
    quiet = torch.zeros(2, dtype=torch.float64)
    outputs = [perturbed(mean, quiet, 1.0, BATCH, BOUNDING) for mean in (with_it, without)]
    angles = to_hyperspherical(torch.stack(outputs))[1][:, 0]
    apart = float((angles[0] - angles[1]).abs())
    assert apart == pytest.approx(math.pi)
    std = angle_scale(2, BATCH, BOUNDING)  # of theta* at sigma = 1
    assert apart / std == pytest.approx(320, rel=1e-3)
    # What (r*, theta*) is said to have, and what it has, at epsilon = 10.
    assert CLAIMED < 1e-9
    assert gaussian_delta(10.0, apart / std) == pytest.approx(1.0, abs=1e-12)


def test_the_vector_alone_hides_that_turn_in_a_random_sign():
    # r is C / 2B there, so r* < 0 in 31 of 100 draws, which puts the vector back to the other side:
    # (a) is a counterexample for the pair (r*, theta*), which the paper's proof is about.
    others, one = opposing_batches()
    with_it = torch.cat([others, one]).sum(0) / BATCH
    flips = sum(
        float(perturbed(with_it, normal(2, seed=s), 1.0, BATCH, BOUNDING)[0]) < 0
        for s in range(2000)
    )
    assert flips / 2000 == pytest.approx(float(norm.cdf(-0.5)), abs=0.05)  # 4.8 sigma


def test_one_example_turns_the_vector_without_cancellation():
    # Counterexample (b), with a first coordinate of C / 8: neither r nor theta_1 can hide it.
    means = [torch.tensor([1 / 8, s / (2 * BATCH), 0.0], dtype=torch.float64) for s in (1, -1)]
    assert float((means[0] - means[1]).norm()) == pytest.approx(1 / BATCH)  # one example's share
    angles = torch.cat([to_hyperspherical(mean[None])[1] for mean in means])
    std = angle_scale(3, BATCH, BOUNDING)
    assert float((angles[0, 1] - angles[1, 1]).abs()) / std > 280
    # The second coordinate r* sin(theta_1*) cos(theta_2*) has the wrong sign only if one of these
    # three Gaussians leaves its interval.
    wrong = (
        norm.cdf(-float(means[0].norm()) * BATCH)
        + norm.cdf(-float(angles[0, 0]) / std)
        + norm.cdf(-(math.pi - float(angles[0, 0])) / std)
        + 2 * norm.cdf(-(math.pi / 2) / std)
    )
    assert 1 - wrong - math.exp(10) * wrong > 0.9998
    assert CLAIMED < 1e-9
    for seed in range(300):
        noise = normal(3, seed=seed)
        signs = [float(perturbed(mean, noise, 1.0, BATCH, BOUNDING)[1].sign()) for mean in means]
        assert signs == [1.0, -1.0]


@pytest.mark.parametrize("batch", [64, 256])
def test_typical_batches_exceed_the_claimed_sensitivity(batch):
    # Counterexample (c): isotropic gradients of length C, one of them removed.
    rows = normal(batch, 1000)
    rows /= torch.linalg.vector_norm(rows, dim=1, keepdim=True)
    mean = rows.mean(dim=0)
    turned = to_hyperspherical(mean - rows / batch)[1] - to_hyperspherical(mean[None])[1]
    turned[:, -1] = torch.remainder(turned[:, -1] + math.pi, 2 * math.pi) - math.pi
    moves = torch.linalg.vector_norm(turned, dim=1)
    assert float(moves.min()) > angle_scale(1000, batch, 0.1)  # every single example
    assert float(moves.min()) > 10 * angle_scale(1000, batch, 0.01)


@each_geometry
def test_the_variants_withstand_the_counterexamples(make):
    for rows in (torch.cat(opposing_batches()), torch.eye(3).double().repeat(8, 1)):
        geometry = make(rows[0])
        lengths = lengths_of(rows)
        change = geometry.contribution(rows, lengths, 1.0) - geometry.contribution(
            rows[:-1], lengths[:-1], 1.0
        )
        for segment, bound in zip(geometry.segments, geometry.bounds(1.0), strict=True):
            assert float(change[segment].norm()) <= bound * (1 + 1e-12)


def test_geodp_is_better_only_where_it_adds_too_little_noise():
    # ALGORITHMS 15.3 (f): sigma = 1, |mean| = C, d = 1e4, B = 256.
    size, batch = 10_000, 256

    def cosine(vector, truth):
        return float(vector @ truth / vector.norm() / truth.norm())

    measured = {beta: [] for beta in (1.0, 0.1, 0.01, 0.001)}
    plain = []
    for seed in range(6):
        mean = normal(size, seed=seed)
        mean /= mean.norm()
        noise = normal(size, seed=100 + seed)
        plain.append(cosine(mean + noise / batch, mean))
        for beta, cosines in measured.items():
            cosines.append(cosine(perturbed(mean, noise, 1.0, batch, beta), mean))
    means = {beta: sum(cosines) / 6 for beta, cosines in measured.items()}
    assert means == pytest.approx({1.0: 0.0, 0.1: 0.01, 0.01: 0.70, 0.001: 0.996}, abs=0.02)
    assert sum(plain) / 6 == pytest.approx(0.93, abs=0.01)
    # Ahead exactly below beta = C / (pi sqrt(d) |g|) = 0.0032.
    assert means[0.001] > sum(plain) / 6 > means[0.01]
