"""The factorisations of correlated noise against dense matrices and brute force."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy.linalg import toeplitz

from tests.support.dense_noise import ORDERS_AND_BANDS, dense
from vestige.errors import ConfigError
from vestige.privacy.factorisation import (
    coefficients,
    inverse_response,
    inverse_root,
    inverse_sensitivity,
    marginal_variances,
    norm,
    tree_sensitivity,
)


@pytest.mark.parametrize(("order", "bands"), ORDERS_AND_BANDS)
def test_coefficients_inverse_and_variances_are_those_of_the_dense_matrix(order, bands):
    c, exact = coefficients(order, bands), dense(order, bands, 40)
    assert np.allclose(c, exact[:bands, 0], rtol=1e-13, atol=0)
    assert norm(c) == pytest.approx(np.linalg.norm(exact[:, 0]), rel=1e-14)
    inverse = np.linalg.inv(exact)
    np.testing.assert_allclose(inverse_response(c, 40), inverse[:, 0], atol=1e-12)
    np.testing.assert_allclose(marginal_variances(c, 40), (inverse**2).sum(1), rtol=1e-12)


@pytest.mark.parametrize("order", [0, -0.5, 1.01, math.nan, math.inf, True, "half", None])
def test_an_order_outside_0_to_1_is_refused(order):
    with pytest.raises(ConfigError, match="order="):
        coefficients(order, 4)


def brute_sensitivity(steps, period):
    leaves = 1
    while leaves < steps:
        leaves *= 2
    worst = 0
    for first in range(period):
        lots = set(range(first, steps, period))
        total, width = 0, 1
        while width <= leaves:
            for start in range(0, leaves, width):
                total += len(lots & set(range(start, start + width))) ** 2
            width *= 2
        worst = max(worst, total)
    return worst


def test_tree_sensitivity_against_brute_force():
    for steps in range(1, 36):
        for period in range(1, 38):
            assert tree_sensitivity(steps, period) == brute_sensitivity(steps, period)


def test_tree_sensitivity_of_one_participation_is_the_number_of_levels():
    for steps in [*range(1, 1100), 2**20 - 1, 2**20, 2**20 + 1]:
        levels = (steps - 1).bit_length() + 1
        assert tree_sensitivity(steps, steps) == levels
        assert tree_sensitivity(steps, 10 * steps + 1) == levels


def test_tree_sensitivity_of_a_long_run():
    """All lots: every node of height h has 2^h of the record's leaves. Few lots: levels apart."""
    assert tree_sensitivity(2**20, 1) == sum(2 ** (20 - h) * 4**h for h in range(21))
    # 2^10 lots, 2^10 apart, each alone in the nodes of heights 0 to 10, then together.
    assert tree_sensitivity(2**20, 2**10) == 2**10 * 10 + sum(
        2 ** (10 - h) * 4**h for h in range(11)
    )


def spaced(steps, apart):
    """Every set of lots that are at least `apart` apart."""
    if steps <= 0:
        return [()]
    without = spaced(steps - 1, apart)
    return without + [(*rest, steps - 1) for rest in spaced(steps - apart, apart)]


@pytest.mark.parametrize(("order", "bands"), [(0.5, 3), (0.8, 4), (1.0, 2), (0.3, 5)])
def test_the_sensitivity_of_spaced_lots_is_the_root_of_their_number(order, bands):
    """Section 19: parts of one record are orthogonal, and k of them move C G by sqrt(k) |c|."""
    steps = 14
    c = norm(coefficients(order, bands))
    whole = dense(order, bands, steps)
    generator = np.random.default_rng(1)
    worst = {}
    for lots in spaced(steps, bands):
        gram = whole[:, lots].T @ whole[:, lots]
        assert np.array_equal(gram, np.diag(np.diag(gram)))
        gradients = generator.standard_normal((len(lots), 3))
        gradients /= np.linalg.norm(gradients, axis=1, keepdims=True) + 1e-300
        moved = np.linalg.norm(whole[:, lots] @ gradients)
        assert moved <= math.sqrt(len(lots)) * c * (1 + 1e-12)
        worst[len(lots)] = max(worst.get(len(lots), 0), moved)
    assert max(worst) == -(-steps // bands)
    for lots, moved in worst.items():
        cut_off = (lots - 1) * bands + bands > steps
        assert cut_off or moved == pytest.approx(math.sqrt(lots) * c, rel=1e-12)


def test_lots_that_are_nearer_than_the_bands_cost_more():
    whole, c = dense(0.5, 4, 12), norm(coefficients(0.5, 4))
    near = whole[:, [0, 3]].sum(1)
    assert np.linalg.norm(near) > math.sqrt(2) * c * 1.01


MOMENTA = [0.0, 0.5, 0.9, 0.999]


def lower(column, steps):
    padded = np.zeros(steps)
    padded[: len(column)] = column[:steps]
    return toeplitz(padded, np.zeros(steps))


@pytest.mark.parametrize("momentum", MOMENTA)
def test_the_whole_inverse_root_is_that_of_the_weights(momentum):
    """D D is the inverse of what makes weights of releases, written as a recursion."""
    steps, weights = 24, np.zeros((24, 24))
    for release in range(steps):
        velocity = weight = 0.0
        for step in range(steps):
            velocity = momentum * velocity + (step == release)
            weight += velocity
            weights[step, release] = weight
    root = lower(inverse_root(momentum, steps), steps)
    np.testing.assert_allclose(root @ root @ weights, np.eye(steps), atol=1e-11)


@pytest.mark.parametrize("momentum", [*MOMENTA, 1 - 1e-9, math.nextafter(1, 0)])
@pytest.mark.parametrize("bands", [1, 2, 3, 8, 64])
def test_an_inverse_root_has_no_positive_coefficient_after_the_first(momentum, bands):
    d = inverse_root(momentum, bands)
    assert len(d) == bands and d[0] == 1 and (d[1:] <= 0).all()
    assert np.array_equal(d, inverse_root(momentum, 200)[:bands])
    assert (inverse_response(d, 300) >= 0).all()


def moved_most(whole, lots):
    """|sum of columns|, the largest over all signs."""
    signs = np.array([(1, *s) for s in itertools.product((1, -1), repeat=len(lots) - 1)])
    return np.linalg.norm(whole[:, list(lots)] @ signs.T, axis=0).max()


@pytest.mark.parametrize("period", [1, 2, 3, 5, 12, 40])
@pytest.mark.parametrize(("momentum", "bands"), [(0.0, 2), (0.0, 5), (0.9, 3), (0.9, 12), (0.5, 1)])
def test_the_sensitivity_of_a_banded_inverse_against_brute_force(momentum, bands, period):
    """Over every set of a record's lots that the groups allow, with gradients in any direction."""
    steps, d = 10, inverse_root(momentum, bands)
    whole = np.linalg.inv(lower(d, steps))
    allowed = [
        lots
        for first in range(min(period, steps))
        for count in range(1, len(range(first, steps, period)) + 1)
        for lots in itertools.combinations(range(first, steps, period), count)
    ]
    claimed = inverse_sensitivity(d, steps, period)
    assert claimed == pytest.approx(max(moved_most(whole, lots) for lots in allowed), rel=1e-12)
    generator = np.random.default_rng(1)
    for lots in allowed:
        gradients = generator.standard_normal((len(lots), 3))
        gradients /= np.linalg.norm(gradients, axis=1, keepdims=True)
        assert np.linalg.norm(whole[:, list(lots)] @ gradients) <= claimed * (1 + 1e-12)
    # Nor are lots worse that are a period or more apart, by whatever distances.
    for lots in spaced(steps, period)[1:]:
        assert np.linalg.norm(whole[:, list(lots)].sum(1)) <= claimed * (1 + 1e-12)


def test_what_is_not_the_sensitivity_of_a_banded_inverse():
    """One column, or C cut off where its inverse is: either would promise too much."""
    d = inverse_root(0.0, 4)
    column = inverse_response(d, 40)
    claimed = inverse_sensitivity(d, 40, 8)
    assert norm(column) < 0.6 * claimed
    assert math.sqrt(5) * norm(column[:4]) < 0.9 * claimed
    with pytest.raises(ValueError, match="positive"):
        inverse_sensitivity(-d, 40, 8)
