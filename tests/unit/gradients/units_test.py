"""Units of several rows: the clipped sum equals a loop over units, whatever rule made it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.support.reference import call, captured_sum, clip_and_sum, loop_gradients
from tests.support.zoo import BY_RULE, cast, zoo
from vestige import UnsupportedModel
from vestige.gradients.clipping import Clip
from vestige.gradients.groups import partition
from vestige.gradients.units import Fold
from vestige.gradients.uses import Tied

NAMES = [name for names in BY_RULE.values() for name in names]
K = 3
# Of the three units of a zoo's nine rows: one has all its rows, one has two, one has one.
WEIGHTS = torch.tensor([1, 1, 1, 1.5, 1.5, 0, 3, 0, 0], dtype=torch.float64)


def of_units(gradients, weights=None):
    """(units, P): the mean over each unit's rows, or over those that there are."""
    weights = torch.ones(len(gradients), dtype=torch.float64) if weights is None else weights
    parts = []
    for first in range(0, len(gradients), K):
        rows = [r for r in range(first, first + K) if weights[r] > 0]
        parts.append(sum(gradients[r] for r in rows) / len(rows))
    return torch.stack(parts)


def case(name, clipping):
    model, x, pick = zoo()[name]
    model, x = model.double(), cast(x, torch.float64)
    groups = partition(model, clipping)
    cotangent = torch.randn_like(pick(call(model, x)))
    return model, x, pick, groups, cotangent


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["views", "users"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("name", NAMES)
def test_clipped_sum_equals_a_loop_over_units(name, clipping, weights):
    model, x, pick, groups, cotangent = case(name, clipping)
    rows = loop_gradients(model, x, cotangent, groups, pick=pick)
    gradients = of_units(rows, weights)
    bound = float(gradients.norm(dim=1).median())
    expected = clip_and_sum(gradients, groups, Clip.over(bound, groups.names))
    for physical in (K, None):
        for reduction in ("sum", "mean"):
            got, _ = captured_sum(
                model,
                x,
                cotangent,
                clipping,
                bound,
                physical,
                pick=pick,
                reduction=reduction,
                unit_rows=K,
                weights=weights,
            )
            assert (got - expected).norm() <= 1e-12 * expected.norm()


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["views", "users"])
@pytest.mark.parametrize("name", ["conv2d", "conv2d gram", "conv2d grouped", "tied", "transformer"])
def test_single_precision_is_as_exact_as_without_units(name, weights):
    model, x, pick, groups, cotangent = case(name, "per_layer")
    gradients = of_units(loop_gradients(model, x, cotangent, groups, pick=pick), weights)
    bound = float(gradients.norm(dim=1).median())
    expected = clip_and_sum(gradients, groups, Clip.over(bound, groups.names))
    got, _ = captured_sum(
        model.float(),
        cast(x, torch.float32),
        cotangent.float(),
        "per_layer",
        bound,
        pick=pick,
        unit_rows=K,
        weights=weights,
    )
    assert (got - expected).norm() <= 1e-5 * expected.norm()


def test_a_use_of_one_row_to_a_unit_is_the_use_itself():
    use = object()
    assert Fold(1)(use) is use
    values = torch.randn(4, 2)
    assert Fold(1).sums(values) is values
    assert Fold(1).spread(values) is values


def test_units_are_spread_over_their_rows_in_order():
    assert Fold(2).spread(torch.tensor([5.0, 7.0])).tolist() == [5, 5, 7, 7]


def test_a_use_that_nothing_is_known_about_is_refused():
    with pytest.raises(UnsupportedModel, match="gave a Tied"):
        Fold(2)(object.__new__(Tied))


@pytest.mark.parametrize("name", ["linear", "conv2d", "conv2d gram", "tied", "layer norm"])
@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_a_row_that_is_not_finite_takes_its_unit_out_and_nobody_else(name, clipping):
    model, x, pick, _, cotangent = case(name, clipping)
    expected, _ = captured_sum(model, x[K:], cotangent[K:], clipping, 0.5, pick=pick, unit_rows=K)
    bad = cotangent.clone()
    bad[1] = torch.inf
    got, _ = captured_sum(model, x, bad, clipping, 0.5, pick=pick, unit_rows=K)
    assert torch.allclose(got, expected, rtol=0, atol=1e-12 * float(expected.norm()))


@pytest.mark.parametrize("name", ["linear", "conv2d", "tied"])
def test_what_a_stand_in_holds_does_not_matter(name):
    model, x, pick, _, cotangent = case(name, "flat")
    expected, _ = captured_sum(model, x, cotangent, unit_rows=K, weights=WEIGHTS, pick=pick)
    bad = cotangent.clone()
    bad[WEIGHTS == 0] = torch.nan
    got, _ = captured_sum(model, x, bad, unit_rows=K, weights=WEIGHTS, pick=pick)
    assert torch.equal(got, expected)


def test_a_unit_of_large_gradients_stays_within_one_bound():
    model, x = nn.Linear(5, 4).double(), torch.randn(9, 5, dtype=torch.float64)
    cotangent = 1e6 * torch.ones(9, 4, dtype=torch.float64)
    for rows in (slice(0, 3), slice(0, 9)):
        got, _ = captured_sum(model, x[rows], cotangent[rows], bounds=0.7, unit_rows=K)
        assert float(got.norm()) <= 0.7 * ((rows.stop - rows.start) / K) * (1 + 1e-9)
