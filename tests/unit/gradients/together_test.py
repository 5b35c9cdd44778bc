"""Groups settled together add what they add one after the other, and drop who must be dropped."""

from __future__ import annotations

import torch
from torch import nn

from vestige.gradients.groups import Slot
from vestige.gradients.together import Held, Together
from vestige.gradients.uses import Outer, PerExample, Viewed

ROWS = 6


def made(sizes, bounds=1.0, spoiled=None):
    """Groups of a weight and a bias (and one of two biases), segments, and what they should add."""
    generator = torch.Generator().manual_seed(0)

    def r(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    groups, segments, expected = [], {}, {}
    for i, (p, d) in enumerate(sizes):
        uses = [PerExample(r(ROWS, p))] if d == 0 else [Outer(r(ROWS, d), r(ROWS, p))]
        uses.append(PerExample(r(ROWS, p)))
        if i == 2:
            uses.append(PerExample(r(ROWS)))
        dense = [use.dense().clone() for use in uses]
        squares = sum(values.reshape(ROWS, -1).square().sum(1) for values in dense)
        factors = (bounds / squares.sqrt()).clamp(max=1)
        if spoiled is not None:
            uses[-1].values[spoiled] = torch.inf
            factors[spoiled] = 0
        held = []
        for k, (use, values) in enumerate(zip(uses, dense, strict=True)):
            name = f"{i}.{k}"
            segments[name] = torch.ones(use.shape, dtype=torch.float64)
            expected[name] = 1 + torch.einsum("n,n...->...", factors, values)
            parameter = nn.Parameter(torch.zeros(use.shape))
            held.append(Held(Slot(name, parameter, i, 0), use, None))
            if isinstance(use, Outer):
                held[-1].take_norms(0.0)
        groups.append(held)
    return groups, segments, expected


def clip(squares):
    bad = ~(squares < torch.inf)
    factors = squares.masked_fill(bad, 0).rsqrt().clamp(max=1)
    return factors.masked_fill(bad, 0)


def settled(sizes, **options):
    groups, segments, expected = made(sizes, **options)
    Together(torch.device("cpu")).settle(groups, clip, segments)
    for name, segment in segments.items():
        assert torch.allclose(segment, expected[name], rtol=1e-9), name


def test_many_groups_add_what_each_adds_by_itself():
    settled([(4, 3), (4, 0), (5, 0), (4, 7), (5, 2)])


def test_one_group_has_one_factor_for_all_of_its_uses():
    settled([(4, 3)])


def test_a_row_that_is_not_finite_drops_out_of_its_group_alone():
    settled([(4, 3), (4, 0), (5, 0)], spoiled=2)


def test_what_waits_is_counted():
    use = PerExample(torch.zeros(5, 2))
    assert use.nbytes == 40
    assert Outer(torch.zeros(5, 3), torch.zeros(5, 2)).nbytes == 100
    weight = torch.zeros(4, 2)
    assert Viewed(use, weight, weight[:1]).nbytes == 40
