"""What the GeoDP paper's appendix proves (arXiv 2504.05618, C.1 to C.6), statement by statement.

docs/methods/geodp.md has the table: what holds, what needs more, what fails. The claim of privacy
itself is taken apart in tests/unit/geometry/published_test.py.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from vestige.geometry.study import DirectionStudy, direction_study

RANDOM = np.random.default_rng(0)
D, LOT, C, SIGMA, RATE = 50, 32, 0.7, 1.3, 0.2


def cosine(a, b):
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


def clipped(gradients, bound):
    norms = np.linalg.norm(gradients, axis=1, keepdims=True)
    return (gradients / np.maximum(1, norms / bound)).mean(0)


def test_theorem_1_is_an_identity():
    """What noise adds to the squared distance from the optimum after one step."""
    weights, optimum, gradient, noise = RANDOM.normal(size=(4, D))
    noisy = gradient + C * noise / LOT
    apart = [np.sum((weights - RATE * g - optimum) ** 2) for g in (noisy, gradient)]
    item_a = 2 * (C * noise / LOT) @ gradient + C**2 * noise @ noise / LOT**2
    item_b = noise @ (optimum - weights)
    assert apart[0] - apart[1] == pytest.approx(RATE**2 * item_a + 2 * RATE * C / LOT * item_b)


def test_corollary_1_holds_on_average():
    """At the optimum noise moves SGD away, by rate^2 C^2 sigma^2 d / B^2 on average, not always."""
    gradient = RANDOM.normal(size=D)
    noise = SIGMA * RANDOM.normal(size=(20_000, D))
    item_a = 2 * C / LOT * noise @ gradient + C**2 * (noise**2).sum(1) / LOT**2
    assert item_a.mean() == pytest.approx(C**2 * SIGMA**2 * D / LOT**2, rel=0.1)
    assert (item_a < 0).any()


def test_corollary_2_states_a_rate_that_does_not_do_it():
    """Item A vanishes at rate |g| / |g*|, and not at its square times the rate."""
    gradient, noise = RANDOM.normal(size=(2, D))
    noisy = gradient + C * noise / LOT

    def item_a(rate):
        return rate**2 * noisy @ noisy - RATE**2 * gradient @ gradient

    ratio = np.linalg.norm(gradient) / np.linalg.norm(noisy)
    assert item_a(RATE * ratio) == pytest.approx(0, abs=1e-12)
    assert abs(item_a(RATE**2 * ratio**2)) > 0.01


@pytest.mark.parametrize(("longest", "same"), [(0.0, True), (0.95, False)])
def test_corollary_2_on_clipping_needs_that_every_gradient_is_clipped(longest, same):
    """Then a smaller bound only scales; where some are not clipped, it turns the mean."""
    gradients = RANDOM.normal(size=(LOT, D))
    gradients *= RANDOM.uniform(1 - longest, 2, size=(LOT, 1)) / np.linalg.norm(
        gradients, axis=1, keepdims=True
    )
    noise = RANDOM.normal(size=D)
    noisy = [clipped(gradients, bound) + bound * noise / LOT for bound in (0.9, 0.3)]
    assert (cosine(*noisy) > 1 - 1e-12) == same


def test_corollary_2_on_batches_fails():
    """A larger batch brings the noisy direction nearer to the true one, as the norm of the noise
    falls: cosine 1 / sqrt(1 + (sigma C sqrt(d) / (B |g|))^2)."""
    gradient = RANDOM.normal(size=2000)
    gradient *= 0.1 * C / np.linalg.norm(gradient)
    cosines = []
    for lot in (256, 1024, 4096):
        noise = SIGMA * RANDOM.normal(size=(20, 2000))
        cosines.append(np.mean([cosine(gradient + C * n / lot, gradient) for n in noise]))
        relative = SIGMA * C * math.sqrt(2000) / (lot * 0.1 * C)
        assert cosines[-1] == pytest.approx(1 / math.sqrt(1 + relative**2), abs=0.02)
    assert cosines[0] + 0.1 < cosines[1] < cosines[2]


def test_theorem_2_is_the_central_limit_theorem_for_coordinates_and_not_for_angles():
    """Means of independent clipped coordinates are normal. The angle of the mean of two opposite
    groups is 0 or pi, whatever the batch."""
    coordinates = RANDOM.uniform(-C, C, size=(4000, 256)).mean(1)
    assert stats.kstest(coordinates / coordinates.std(), "norm").pvalue > 1e-4
    opposite = RANDOM.choice([-C, C], size=(4000, 255)).mean(1)
    angles = np.arctan2(0.0, opposite)
    assert set(np.round(angles, 6)) == {0.0, round(math.pi, 6)}


def test_lemma_1_holds_for_a_bounding_factor_that_hides_nothing():
    """Some bounding factor beats DP-SGD's direction error: that at which the noise on all angles
    together is below that of DP-SGD, far below what one record can turn them by (pi)."""
    facts = {"dimension": 500, "batch": 512, "sigma": 4.0, "signal": 0.05, "trials": 3, "seed": 0}
    more = {"examples": 16, "releases": 3}
    errors = {
        bounding: direction_study(DirectionStudy(**facts, **more, bounding=bounding))
        for bounding in (1.0, 0.001)
    }
    large, small = errors[1.0], errors[0.001]
    assert large["geodp_direction_mse"] > large["dp_sgd_direction_mse"]
    assert small["geodp_direction_mse"] < small["dp_sgd_direction_mse"]
    claimed = math.sqrt(502) * 0.001 * math.pi / 512
    assert claimed * 4.0 < 0.001 * math.pi


def test_theorem_3_takes_a_right_angle_for_agreement():
    """Its proof makes <g*, g> zero, which is a right angle. What it needs, rate* g* = rate g, has
    the largest inner product of its length."""
    gradient = np.array([1.0, 0.0])
    across, along = np.array([0.0, 1.0]), np.array([1.0, 0.0])
    item_c = {
        name: np.linalg.norm(g - gradient) for name, g in (("right", across), ("same", along))
    }
    assert across @ gradient == 0 and item_c["right"] > 1
    assert along @ gradient == 1 and item_c["same"] == 0


def test_radius_and_angles_at_sigma_are_one_release_at_sigma_over_sqrt_2():
    """Both come from one lot. Delta of the pair at epsilon 1, drawn, beside the closed form."""

    def delta(mu, epsilon=1.0):  # of one Gaussian release of sensitivity mu at noise 1
        return stats.norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * stats.norm.cdf(
            -mu / 2 - epsilon / mu
        )

    pair = np.random.default_rng(1).normal(1 / SIGMA, 1.0, (400_000, 2))  # with the record
    loss = (pair**2 - (pair - 1 / SIGMA) ** 2).sum(1) / 2
    drawn = np.maximum(0, 1 - np.exp(1.0 - loss))
    error = drawn.std() / math.sqrt(len(drawn))
    assert abs(drawn.mean() - delta(math.sqrt(2) / SIGMA)) < 5 * error
    assert drawn.mean() > delta(1 / SIGMA) + 50 * error


def test_every_statement_of_the_page_has_a_verdict_and_a_test():
    root = Path(__file__).parents[2]
    page = (root / "docs/methods/geodp.md").read_text().partition("one by one")[2]
    rows = [line for line in page.splitlines() if line.startswith("|")][2:]
    tests = "".join(path.read_text() for path in (root / "tests").rglob("geometry/*_test.py"))
    tests += Path(__file__).read_text()
    assert len(rows) == 10
    for row in rows:
        _, verdict, why = (cell.strip() for cell in row.strip("|").split(" | "))
        assert verdict.removesuffix(" on average") in ("holds", "needs more", "fails")
        named = re.findall(r"`(test_\w+)`", why)
        assert named and all(f"def {name}(" in tests for name in named), row
